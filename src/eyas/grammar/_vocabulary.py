"""The tokens of a model as the grammar library sees them: the bytes that each token adds to the text.

Tokenizers are byte-level or SentencePiece, and a model's vocabulary may be larger than its
tokenizer's. Special tokens and ids that the tokenizer does not have have no text, and are never
allowed.

One more id than the model has, `end`, means the end of the text. So one table serves requests with
any end-of-sequence ids, and none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eyas.errors import ModelError
from eyas.text import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Vocabulary"]

MAX_FORCED = 1000  # of more tokens that may follow, no text is common to all


class Vocabulary:
    """The bytes of `size` tokens.

    Attributes:
        texts: the bytes of each token, with `end` as the last one; None for tokens that are not text.
        end: the id that means the end of the text.
        words: int32 numbers that hold one bit for each token and for `end`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, size: int) -> None:
        if tokenizer is None:
            raise ModelError("structured output needs a tokenizer, but this target has none")
        self.tokenizer: Any = tokenizer
        self.size = self.end = size
        self.texts: list[bytes | None] = [*token_bytes(tokenizer, size), None]
        self.words = (size + 1 + 31) // 32

    def allowed(self, bits_NW: Tensor) -> tuple[Tensor, Tensor]:
        """Return (bool [N, V], bool [N]): the tokens among masks of bits, and whether the text may end."""
        bytes_NX = bits_NW.view(torch.uint8).numpy()
        bool_NV = torch.from_numpy(np.unpackbits(bytes_NX, axis=-1, bitorder="little")).view(torch.bool)
        return bool_NV[:, : self.size], bool_NV[:, self.end]

    def forced(self, bits_1W: Tensor) -> tuple[bytes, int | None]:
        """Return the text that all allowed tokens begin with, as far as they are not parts of it; and the token
        that is this text, if it is allowed. (b"", None) where the text may end."""
        allowed_1V, ends_1 = self.allowed(bits_1W)
        tokens = allowed_1V[0].nonzero()[:, 0].tolist()
        if bool(ends_1[0]) or not 0 < len(tokens) <= MAX_FORCED:
            return b"", None
        by_text = {self.texts[token] or b"": token for token in tokens}
        texts = sorted(by_text)
        # a text that begins another one comes right before one that it begins
        whole = [text for text, after in zip(texts, [*texts[1:], b""], strict=True) if not after.startswith(text)]
        first, last = whole[0], whole[-1]
        differ = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
        forced = first[: next(differ, min(len(first), len(last)))]
        return forced, by_text.get(forced)

    def split(self, text: bytes) -> list[int]:
        """Return the tokens of a text in the middle of another one; none if the tokenizer has none that join to it."""
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            decoded = text[: error.start].decode("utf-8")
        for before in ("", "\n"):  # some tokenizers put a space before the first word of a text
            ids = self.tokenizer.encode(before + decoded, add_special_tokens=False)
            if tokens := self._last_tokens(ids, decoded.encode("utf-8")):
                return tokens
        return []

    def _last_tokens(self, ids: Sequence[int], text: bytes) -> list[int]:
        """Return the last ids, as many as join to the text; none where no number of them does."""
        joined, tokens = b"", list[int]()
        for token in reversed(ids):
            joined = (self.texts[token] or b"") + joined
            tokens.insert(0, token)
            if len(joined) >= len(text):
                break
        return tokens if joined == text else []
