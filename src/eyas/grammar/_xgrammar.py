"""Matchers of xgrammar, which walks a draft tree in one call.

xgrammar leaves out what it does not know of JSON schema. So `serves` names the keywords that it
follows, and other schemas are left to llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.grammar._structure import Structure
from eyas.grammar._vocabulary import Vocabulary

__all__ = ["XGrammar"]

# Keywords of JSON schema that both libraries read alike (tests/grammar compares their masks); those
# of DESCRIBING forbid nothing.
DESCRIBING = frozenset({"title", "description", "default", "examples", "$schema", "$id"})
KEYWORDS = DESCRIBING | {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions",
}  # fmt: skip


class XGrammar:
    """The library with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library: Any = xgrammar
        self._vocabulary = vocabulary
        texts = [text or b"" for text in vocabulary.texts]  # without bytes: never allowed
        info = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.RAW, vocab_size=vocabulary.size + 1, stop_token_ids=[vocabulary.end]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    @staticmethod
    def serves(structure: Structure) -> bool:
        """Whether the library follows everything that the structure says."""
        if structure.kind == "json":
            return all(keyword in KEYWORDS for keyword in _keywords(json.loads(structure.text)))
        return structure.kind != "lark" or "%" not in structure.text  # schemas inside grammars are spaced otherwise

    def compile(self, structure: Structure) -> XGMatcher:
        """A matcher at the beginning of the text; InputError for what the library cannot compile."""
        try:
            compiled = self._compile(structure)
        except RuntimeError as error:
            raise InputError(f"xgrammar cannot use it: {_last_part(str(error))}") from None
        return XGMatcher(self._library.GrammarMatcher(compiled))

    def _compile(self, structure: Structure) -> Any:
        compiler, text = self._compiler, structure.text
        if structure.kind == "json":
            return compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
        if structure.kind == "regex":
            return compiler.compile_regex(_without_newlines(text))
        return compiler.compile_lark(text) if structure.kind == "lark" else compiler.compile_grammar(text)


def _keywords(schema: Any) -> Iterator[str]:
    """The keywords of a schema and of the schemas inside it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        yield keyword
        if keyword in ("properties", "$defs", "definitions") and isinstance(value, dict):
            inner = list(value.values())
        elif keyword in ("enum", "const", "default", "examples", "required"):
            inner = []
        else:
            inner = value if isinstance(value, list) else [value]
        for one in inner:
            yield from _keywords(one)


def _without_newlines(regex: str) -> str:
    """The expression with every dot as [^\\n], which is what a dot means; xgrammar's matches the
    end of a line, too."""
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", regex, re.DOTALL)
    return "".join(r"[^\n]" if part == "." else part for part in parts)


def _last_part(message: str) -> str:
    """The library's message without the time and the place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", message.strip().splitlines()[0])


class XGMatcher:
    """A matcher of xgrammar (`Matcher`)."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> XGMatcher:
        """A matcher of its own at the same place."""
        return XGMatcher(self._matcher.fork())

    def walk(self, children: Sequence[Sequence[int]], tokens: Sequence[int], bits_NW: Tensor) -> None:
        """See `Matcher.walk`."""
        if len(children) == 1:
            self._matcher.fill_next_token_bitmask(bits_NW, 0)
            return
        first, sibling = [-1] * len(children), [-1] * len(children)
        for node, below in enumerate(children):
            if below:
                first[node] = below[0]
                for elder, younger in pairwise(below):
                    sibling[elder] = younger
        links_3N = torch.tensor([first, sibling, list(tokens)])
        self._matcher.traverse_draft_tree(links_3N[0], links_3N[1], links_3N[2], bits_NW)

    def accept(self, token: int) -> bool:
        """See `Matcher.accept`."""
        accepted: bool = self._matcher.accept_token(token)
        return accepted

    def forced(self) -> bytes:
        """See `Matcher.forced`."""
        text: str = self._matcher.find_jump_forward_string()
        return text.encode("utf-8")
