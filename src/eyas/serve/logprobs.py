"""Log-probabilities in OpenAI's two forms and in vLLM's form for prompts: they come from the raw logits,
without penalties, temperature and masks. A token's own value and its value among the most probable ones are one
float: lm-eval compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from eyas.core.logprobs import TokenLogprobs
from eyas.errors import ModelError
from eyas.serve.errors import JsonObject
from eyas.text import Detokeniser, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Tokens 0..vocab - 1 as clients read them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab

    @cached_property
    def _in_text(self) -> list[bytes | None]:
        """By id, the text that a token adds; None for special tokens and ids without a token."""
        if self._tokenizer is None:
            return [str(token).encode() for token in range(self._vocab)]
        try:
            return token_bytes(self._tokenizer, self._vocab)
        except ModelError:  # a tokenizer written in Python
            special = {*self._tokenizer.all_special_ids}
            texts = map(self._tokenizer.decode, ([token] for token in range(self._vocab)))
            return [None if token in special else str(text).encode() for token, text in enumerate(texts)]

    @cached_property
    def _bytes(self) -> list[bytes]:
        """By id. A special token has its name, an id without a token its number."""
        ids = range(self._vocab)
        names = [None] * self._vocab if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(list(ids))
        named = (name if isinstance(name, str) else str(token) for token, name in zip(ids, names, strict=True))
        return [other.encode() if text is None else text for text, other in zip(self._in_text, named, strict=True)]

    def has_text(self, token: int) -> bool:
        """Return whether a token stands for text."""
        return self._in_text[token] is not None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        """Return the token's text; part of a character is a replacement character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def completion(
        self, tokens: Sequence[int], values: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> JsonObject:
        """Return the `logprobs` of a completion. `values` has None for the first token of a prompt."""
        return {
            "tokens": [self.text_of(token) for token in tokens],
            "token_logprobs": [None if value is None else _finite(value.logprob) for value in values],
            "top_logprobs": [None if value is None else self._top(value) for value in values],
            "text_offset": list(offsets),
        }

    def offsets(self, text: str, begin: int = 0) -> TextOffsets:
        """Return offsets of tokens after the first `begin` characters of a text. Special tokens in the text have a
        place in it."""
        detokeniser = None if self._tokenizer is None else Detokeniser(self._tokenizer)
        return TextOffsets(self, detokeniser, text, begin)

    def _top(self, value: TokenLogprobs) -> dict[str, float]:
        """Return the most probable tokens and the token itself, by text; of equal texts, the more probable."""
        listed: dict[str, float] = {}
        for token, logprob in (*value.top, (value.token, value.logprob)):
            listed.setdefault(self.text_of(token), _finite(logprob))
        return listed

    def chat(self, values: Iterable[TokenLogprobs], count: int) -> JsonObject:
        """Return the `logprobs` of a chat's choice, each token with the `count` most probable ones."""
        return {
            "content": [
                {
                    **self._entry(value.token, value.logprob),
                    "top_logprobs": [self._entry(*pair) for pair in value.top[:count]],
                }
                for value in values
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> JsonObject:
        return {"token": self.text_of(token), "logprob": _finite(logprob), "bytes": list(self.bytes_of(token))}

    def prompt(self, values: Iterable[TokenLogprobs | None]) -> list[JsonObject | None]:
        """Return vLLM's `prompt_logprobs`: for each token the most probable ones and itself, by id."""
        return [None if value is None else self._ranked(value) for value in values]

    def _ranked(self, value: TokenLogprobs) -> JsonObject:
        ranked = {str(token): self._rank(token, logprob, i) for i, (token, logprob) in enumerate(value.top, start=1)}
        ranked.setdefault(str(value.token), self._rank(value.token, value.logprob, None))
        return ranked

    def _rank(self, token: int, logprob: float, rank: int | None) -> JsonObject:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text_of(token)}


class TextOffsets:
    """Counts where tokens begin in a text, in characters; within a character, where the character does."""

    def __init__(self, texts: TokenTexts, detokeniser: Detokeniser | None, text: str, begin: int) -> None:
        self._texts, self._detokeniser, self._text = texts, detokeniser, text
        self._certain = begin  # characters that are certain
        self._held = b""  # bytes of the tokens since then
        self._offset = begin

    def read(self, token: int) -> int:
        """Read the next token; returns its offset."""
        offset, piece = self._offset, self._texts.bytes_of(token)
        if self._detokeniser is None:
            self._offset += len(piece.decode())
            return offset
        if not self._texts.has_text(token):
            spelled = len(piece.decode()) if self._text.startswith(piece.decode(), offset) else 0
            self._certain, self._offset = self._certain + spelled, offset + spelled
            return offset
        text = self._detokeniser.feed(token)
        self._certain += len(text)
        if text.endswith(own := piece.decode("utf-8", "replace")):  # what was held before is not whole, and certain now
            offset = self._certain - len(own)
        self._held = b"" if text else self._held + piece
        tail = self._detokeniser.tail()
        # the whole characters of an open run of bytes, which reads as replacement characters until it is whole
        held = self._held.decode("utf-8", "ignore") if "\ufffd" in tail else tail
        self._offset = self._certain + len(held)
        return offset


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
