"""Structured output: constraints from JSON schemas, regular expressions, grammars and choices.

    grammars = Grammars(tokenizer, vocab_size)
    constraint = grammars.constraint(structure_of({"regex": "[0-9]+"}), eos)

llguidance reads and checks every structure. Where xgrammar is installed and follows all that a
structure says, it computes the masks: its walk over a tree is one call. Both allow the same texts,
except for a few escapes in JSON strings, which only xgrammar allows.

This package knows no model and no tree policy; it implements `core.constraints.Constraint`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from eyas.errors import InputError, OptionError
from eyas.grammar._structure import JSON_OPTIONS, KEYWORDS, Structure, structure_of
from eyas.grammar._vocabulary import Vocabulary
from eyas.grammar._walk import GrammarConstraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["JSON_OPTIONS", "KEYWORDS", "LIBRARIES", "GrammarConstraint", "Grammars", "Structure", "structure_of"]

LIBRARIES = ("auto", "llguidance", "xgrammar")
MAX_COMPILED = 64  # structures that are kept compiled


class Grammars:
    """The structures of one tokenizer, compiled once and kept while they are in use.

    Args:
        vocab_size: the model's; ids that the tokenizer does not have are never allowed.
        library: "auto": xgrammar where it is installed and follows the whole structure, else llguidance.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, library: str = "auto") -> None:
        if library not in LIBRARIES:
            raise OptionError(f"the grammar library must be one of {', '.join(LIBRARIES)}, got {library!r}")
        for name in ("llguidance", library):
            if name != "auto" and find_spec(name) is None:
                extra = "grammar" if name == "llguidance" else "xgrammar"
                raise OptionError(
                    f"structured output needs {name}, which is not installed: pip install 'eyas[{extra}]' (in a clone: '.[{extra}]')"
                )
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._library = library
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._llguidance: Any = None
        self._xgrammar: Any = None

    def constraint(self, structure: Structure, eos: Collection[int]) -> GrammarConstraint:
        """A constraint at the beginning of its text.

        Args:
            eos: ids that may end the text.

        Raises:
            InputError: the schema, expression or grammar cannot be used.
        """
        with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = self._compile(structure)
            self._compiled.move_to_end(structure)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            matcher = self._compiled[structure].copy()
        return GrammarConstraint(matcher, self._vocabulary, eos)

    def _compile(self, structure: Structure) -> Any:
        """The matcher by the library that serves the structure; llguidance checks it in either case."""
        if self._llguidance is None:
            from eyas.grammar._llguidance import LLGuidance

            self._llguidance = LLGuidance(self._vocabulary)
        checked = self._llguidance.compile(structure)
        if self._library == "llguidance" or find_spec("xgrammar") is None:
            return checked
        from eyas.grammar._xgrammar import XGrammar

        if self._library == "auto" and not XGrammar.serves(structure):
            return checked
        if self._xgrammar is None:
            self._xgrammar = XGrammar(self._vocabulary)
        try:
            return self._xgrammar.compile(structure)
        except InputError:
            if self._library == "xgrammar":
                raise
            return checked
