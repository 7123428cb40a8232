"""Log-probabilities in OpenAI's two forms and in vLLM's form for prompts.

They are those of the target's raw logits, before penalties, temperature and masks, as in vLLM. A
token's own value and the same token's among the most probable ones are one and the same float:
lm-eval compares them for equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eyas.core.requests import TokenLogprobs
from eyas.errors import ModelError
from eyas.text import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenTexts"]

LEAST = -9999.0  # JSON has no infinity


class TokenTexts:
    """Tokens as clients read them.

    Args:
        vocab: ids that the target may emit: 0..vocab - 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab

    @cached_property
    def _bytes(self) -> list[bytes]:
        """By id. A special token has its name, an id without a token its number; so has every id
        where there is no tokenizer."""
        numbers = [str(token).encode() for token in range(self._vocab)]
        if self._tokenizer is None:
            return numbers
        names = self._tokenizer.convert_ids_to_tokens(list(range(self._vocab)))
        try:
            texts = token_bytes(self._tokenizer, self._vocab)
        except ModelError:  # a tokenizer written in Python
            texts = [str(self._tokenizer.decode([token])).encode() for token in range(self._vocab)]
        named = (
            name.encode() if isinstance(name, str) else number for name, number in zip(names, numbers, strict=True)
        )
        return [other if text is None else text for text, other in zip(texts, named, strict=True)]

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes, which may be part of a character."""
        return self._bytes[token]

    def text_of(self, token: int) -> str:
        """The token's text; part of a character is a replacement character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    # --- completions ---

    def completion(
        self, tokens: Sequence[int], values: Sequence[TokenLogprobs | None], offset: int = 0
    ) -> dict[str, Any]:
        """The `logprobs` of a completion.

        Args:
            tokens: those of the prompt (echo) and the answer.
            values: None for the first token of a prompt.
            offset: characters of the text before the first of these tokens.
        """
        texts = [self.text_of(token) for token in tokens]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else _finite(value.logprob) for value in values],
            "top_logprobs": [None if value is None else self._top(value) for value in values],
            "text_offset": offsets[:-1],
        }

    def _top(self, value: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the token itself, by text; of two with the same text, the
        more probable one."""
        listed: dict[str, float] = {}
        for token, logprob in (*value.top, (value.token, value.logprob)):
            listed.setdefault(self.text_of(token), _finite(logprob))
        return listed

    # --- chats ---

    def chat(self, values: Iterable[TokenLogprobs], count: int) -> dict[str, Any]:
        """The `logprobs` of a chat's choice, each token with the `count` most probable ones."""
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

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text_of(token), "logprob": _finite(logprob), "bytes": list(self.bytes_of(token))}

    # --- prompts ---

    def prompt(self, values: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token the most probable ones and itself, by id."""
        return [None if value is None else self._ranked(value) for value in values]

    def _ranked(self, value: TokenLogprobs) -> dict[str, Any]:
        ranked = {str(token): self._rank(token, logprob, i) for i, (token, logprob) in enumerate(value.top, start=1)}
        ranked.setdefault(str(value.token), self._rank(value.token, value.logprob, None))
        return ranked

    def _rank(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text_of(token)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
