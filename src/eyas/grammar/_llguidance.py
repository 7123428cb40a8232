"""llguidance: structures are compiled, and a request's constraint is walked over draft trees, a token forward and a token
back.

The matcher is at the end of the accepted text. `mask` walks the tree depth first and leaves the matcher where
it was. It does not visit nodes whose token their parent forbids, nor nodes after the end of the text.

Letters: N nodes, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.grammar._structure import Structure, json_rule
from eyas.grammar._vocabulary import Vocabulary

__all__ = ["GrammarConstraint", "LLGuidance", "LLMatcher"]

# below the library's own: less memory for one request
LIMITS = {"max_grammar_size": 200_000, "max_lexer_states": 100_000}
# masks allow every token that fits, not only the tokenizer's own split of a forced text
PURE = '%llguidance {"no_forcing": true}'
NO_TOKEN = "NoExtensionBias"  # the library's error where no token continues the text
NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "grammar", "ebnf": "grammar"}


class LLGuidance:
    """The library with one vocabulary; each structure's matcher is made once and copied."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._library: Any = llguidance
        self._vocabulary = vocabulary
        tokens = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocabulary.size + 1, eos_token=vocabulary.end)

    def compile(self, structure: Structure) -> LLMatcher:
        """Return a matcher at the beginning of the text."""
        try:
            grammar = _as_lark(structure)
        except ValueError as error:
            raise _unusable(structure, str(error)) from None
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _unusable(structure, matcher.get_error())
        return LLMatcher(matcher, self._vocabulary)


def _as_lark(structure: Structure) -> str:
    """Return the structure in the library's grammar language; raise ValueError where it cannot be written so."""
    import llguidance
    from llguidance import _lib

    text = structure.text
    if structure.kind == "json":
        text = f"start: {json_rule(json.loads(text))}"
    elif structure.kind == "regex":
        # \d, \w and \s are of ASCII characters
        text = "start: /" + _lib.regex_to_lark(text, "dws").replace("\n", r"\n") + "/"
    elif structure.kind == "ebnf":
        try:
            text = llguidance.gbnf_to_lark.any_to_lark(text).replace("%llguidance {}", "")
        except Exception as error:  # the library raises Exception itself
            raise ValueError("it is nested too deeply" if isinstance(error, RecursionError) else str(error)) from None
    own_options = structure.kind == "lark" and "%llguidance" in text
    return text if own_options else f"{text}\n{PURE}\n"


def _unusable(structure: Structure, message: str) -> InputError:
    return InputError(f"the {NAMES[structure.kind]} cannot be used: {_reason(message)}")


class _Tokens:
    """The vocabulary as `LLTokenizer` asks for it. Ids without a text get bytes that occur in no text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end
        self.bos_token_id = None
        self.tokens = [text or b"<no text %d>" % token for token, text in enumerate(vocabulary.texts)]
        self.special_token_ids = [token for token, text in enumerate(vocabulary.texts) if not text]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.split(text.encode("utf-8") if isinstance(text, str) else text)


class LLMatcher:
    """A matcher of llguidance, at the end of an accepted text."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> LLMatcher:
        return LLMatcher(self._matcher.deep_copy(), self._vocabulary)

    def walk(self, children: Sequence[Sequence[int]], tokens: Sequence[int], bits_NW: Tensor) -> None:
        """Write the mask of every node that the text can reach into its row of `bits_NW`; the other
        rows stay as they are."""
        self._visit(0, children, tokens, bits_NW, bits_NW.data_ptr())

    def _visit(
        self, node: int, children: Sequence[Sequence[int]], tokens: Sequence[int], bits_NW: Tensor, address: int
    ) -> None:
        matcher, row_bytes = self._matcher, 4 * self._vocabulary.words
        matcher.unsafe_compute_mask_ptr(address + node * row_bytes, row_bytes)
        self._check()
        if not children[node] or matcher.is_stopped():
            return
        row_W = bits_NW[node].tolist()
        for child in children[node]:
            token = tokens[child]
            if row_W[token >> 5] >> (token & 31) & 1:
                matcher.consume_token(token)
                self._visit(child, children, tokens, bits_NW, address)
                matcher.rollback(1)

    def accept(self, token: int) -> bool:
        """Go on after this token; False where the grammar forbids it."""
        accepted = bool(self._matcher.try_consume_tokens([token]) == 1)
        self._check()
        return accepted

    def forced(self, limit: int) -> bytes:
        """Return the text that must come next, as far as `limit` tokens reach; it may begin and end within a
        character. The library's own function reads a forced text to its end, which can be the whole answer."""
        text, bits_1W = b"", torch.full((1, self._vocabulary.words), -1, dtype=torch.int32)
        accepted = 0
        while accepted < limit and not self._matcher.is_stopped():
            self.walk([[]], [0], bits_1W)
            more, token = self._vocabulary.forced(bits_1W)
            text += more
            if token is None:
                break
            self._matcher.consume_token(token)
            accepted += 1
        self._matcher.rollback(accepted)
        return text

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            if reason == NO_TOKEN:
                raise InputError("the tokenizer has no token for the text that the constraint asks for next")
            raise InputError(f"the constraint is too much for the grammar library: {reason}")


def _reason(message: str) -> str:
    """Return the part of a library's message that names the mistake, on one line."""
    lines = [line.strip() for line in message.strip().splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (reasons or lines or ["no reason given"])[0].rstrip(".")
    return re.sub(r"^(at \S+ )?failed to compile JSON schema: ", "", line)


class GrammarConstraint:
    """The texts of one request (`core.features.Constraint`).

    The request is finished at the token that completes its text: an end-of-sequence token that would have
    to follow is not waited for.

    Args:
        eos: ids that may end the text where the grammar lets it end; those that are text themselves
            (stop tokens of a request) are text for the grammar.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, eos: Collection[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = sorted(token for token in eos if 0 <= token < vocabulary.size and not vocabulary.texts[token])
        self._ended = False
        # the tokens that may follow the accepted text (bool [V]), and whether it may end
        self._root: tuple[Tensor, bool] | None = None

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        nodes = len(parents)
        if nodes == 1 and not self._ended:
            allowed_V, may_end = self._next()
            allowed_1V, ends_1 = allowed_V[None].clone(), torch.tensor([may_end])
        elif self._ended:
            return torch.ones(nodes, self._vocabulary.size, dtype=torch.bool)
        else:
            allowed_1V, ends_1 = self._walk(parents, tokens)
        return self._with_eos(allowed_1V, ends_1)

    def _with_eos(self, allowed_NV: Tensor, ends_N: Tensor) -> Tensor:
        """Return the masks with the end-of-sequence ids, where the text may end and may go on. The
        rows of nodes that complete it stay empty."""
        allowed_NV[:, self._eos] |= (ends_N & allowed_NV.any(-1))[:, None]
        return allowed_NV

    def _walk(self, parents: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        children: list[list[int]] = [[] for _ in parents]
        texts, size = self._vocabulary.texts, self._vocabulary.size
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            if parent >= 0 and token < size and texts[token]:
                children[parent].append(node)
        bits_NW = torch.full((len(parents), self._vocabulary.words), -1, dtype=torch.int32)
        self._matcher.walk(children, tokens, bits_NW)
        return self._vocabulary.allowed(bits_NW)

    def accept(self, tokens: Sequence[int]) -> None:
        """See `Constraint.accept`.

        Raises:
            InputError: the grammar forbids a token, which happens only where something else forbids
                all that it allows.
        """
        for token in tokens:
            if self._ended:
                return
            if token in self._eos:
                self._ended = True
            elif not self._matcher.accept(token):
                raise InputError(
                    f"token {token} cannot follow: the constraint allows only tokens that the request's other options forbid"
                )
            self._root = None

    @property
    def finished(self) -> bool:
        if not self._ended:
            allowed_V, _ = self._next()
            self._ended = not bool(allowed_V.any())
        return self._ended

    def forced(self, limit: int) -> list[int]:
        """See `Constraint.forced`. The last token is left out where text may follow: it may be a
        longer one then."""
        if limit < 1 or self.finished:
            return []
        text = self._matcher.forced(limit + 1)
        return self._vocabulary.split(text)[:-1][:limit] if text else []

    def _next(self) -> tuple[Tensor, bool]:
        if self._root is None:
            bits_1W = torch.full((1, self._vocabulary.words), -1, dtype=torch.int32)
            self._matcher.walk([[]], [0], bits_1W)
            allowed_1V, ends_1 = self._vocabulary.allowed(bits_1W)
            self._root = allowed_1V[0], bool(ends_1[0])
        return self._root
