"""Structured output: constraints from JSON schemas, regular expressions, grammars and choices.

    grammars = Grammars(tokenizer, vocab_size)
    constraint = grammars.constraint(structure_of({"regex": "[0-9]+"}), eos)

llguidance reads the structures and computes the masks. This package knows no model and no tree
policy; it implements `core.features.Constraint`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING

from eyas.errors import OptionError
from eyas.grammar._llguidance import GrammarConstraint, LLGuidance, LLMatcher
from eyas.grammar._structure import KEYWORDS, Structure, json_rule, structure_of
from eyas.grammar._vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["KEYWORDS", "GrammarConstraint", "Grammars", "Structure", "json_rule", "structure_of"]

MAX_COMPILED = 64  # structures that are kept compiled


class Grammars:
    """The structures of one tokenizer, compiled once and kept while they are in use.

    Args:
        vocab_size: the model's; ids that the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        if find_spec("llguidance") is None:
            raise OptionError(
                "structured output needs llguidance, which is not installed: pip install '.[grammar]' in a clone of eyas"
            )
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._lock = Lock()
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()

    @cached_property
    def _library(self) -> LLGuidance:
        return LLGuidance(self._vocabulary)

    def constraint(self, structure: Structure, eos: Collection[int]) -> GrammarConstraint:
        """Return a constraint at the beginning of its text.

        Args:
            eos: ids that may end the text.

        Raises:
            InputError: the schema, expression or grammar cannot be used.
        """
        with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = self._library.compile(structure)
            self._compiled.move_to_end(structure)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            matcher = self._compiled[structure].copy()
        return GrammarConstraint(matcher, self._vocabulary, eos)
