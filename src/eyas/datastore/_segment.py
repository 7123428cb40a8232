"""One text of tokens with its sorted suffixes (a suffix array): finds a pattern, and the tokens
that follow it.

    tokens     documents, each followed by a separator, which is no token; big-endian, so that comparing bytes compares tokens
    suffixes   the positions of all suffixes, sorted by their first `depth` tokens

The suffixes that begin with a pattern are neighbours in this order, sorted by the tokens that
follow: two binary searches find them.

Shapes: T tokens, S matches, D tokens after a match. This module knows no file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from eyas.datastore._suffixes import Array, order_of

__all__ = ["Segment", "Span", "concatenate", "dtype_for", "join_documents", "separator_of"]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Two bytes for a token if all ids and the separator fit into them, otherwise four."""
    return np.dtype(">u2" if vocab_size < 1 << 16 else ">u4")


def separator_of(dtype: np.dtype[Any]) -> int:
    """The value after every document: the largest one, which is no token."""
    return int(np.iinfo(dtype).max)


def join_documents(documents: Iterable[Sequence[int]], dtype: np.dtype[Any]) -> Array:
    """[T]: documents end to end, each with its separator."""
    end = np.array([separator_of(dtype)], dtype)
    return concatenate([part for document in documents for part in (np.asarray(document, dtype), end)], dtype)


def concatenate(parts: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Arrays end to end, in this dtype (np.concatenate alone would change the order of bytes to the
    machine's).
    """
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)


class Span(NamedTuple):
    """Matches of a pattern: `suffixes[begin:end]` all start with these `length` tokens."""

    length: int
    begin: int
    end: int


class Segment:
    """Tokens and sorted suffixes, in memory or memory-mapped."""

    def __init__(self, tokens_T: Array, suffixes_T: Array) -> None:
        assert tokens_T.dtype in (np.dtype(">u2"), np.dtype(">u4")), "tokens must be big-endian"
        # plain arrays over the same memory, as indexing a np.memmap is slow
        self.tokens_T = tokens_T.view(np.ndarray)
        self.suffixes_T = suffixes_T.view(np.ndarray)
        self.token_bytes = self.tokens_T.dtype.itemsize
        self._bytes = self.tokens_T.view(np.uint8).data

    @classmethod
    def of(cls, tokens_T: Array, depth: int) -> Segment:
        """A segment of these tokens, whose suffixes are sorted here."""
        return cls(tokens_T, order_of(tokens_T, depth))

    def longest(self, context: Sequence[int], shortest: int, longest: int) -> Span | None:
        """The matches of the longest suffix of the context, of `shortest` to `longest` tokens, that
        the text contains; None without one.

        The text contains a shorter suffix wherever it contains a longer one, so the length is found
        by bisection too.
        """
        dtype = self.tokens_T.dtype
        tokens = np.asarray(context[max(0, len(context) - longest) :], np.int64)
        too_large = np.flatnonzero(tokens > np.iinfo(dtype).max)  # a target may have more tokens than its tokenizer
        if len(too_large):
            tokens = tokens[too_large[-1] + 1 :]
        longest, pattern = len(tokens), tokens.astype(dtype).tobytes()
        low, high, begin = shortest - 1, longest, 0
        while low < high:
            length = (low + high + 1) // 2 if low >= shortest else shortest
            suffix = pattern[(longest - length) * self.token_bytes :]
            slot = bisect_left(range(len(self.suffixes_T)), suffix, key=self._reader(len(suffix)))
            if slot < len(self.suffixes_T) and self._reader(len(suffix))(slot) == suffix:
                low, begin = length, slot
            else:
                high = length - 1
        if low < shortest:
            return None
        suffix = pattern[(longest - low) * self.token_bytes :]
        end = bisect_right(range(len(self.suffixes_T)), suffix, lo=begin, key=self._reader(len(suffix)))
        return Span(low, begin, end)

    def _reader(self, size: int) -> Any:
        """A function: slot -> the first `size` bytes of its suffix."""
        tokens, position_of, token_bytes = self._bytes, self.suffixes_T.item, self.token_bytes

        def read(slot: int) -> bytes:
            begin = position_of(slot) * token_bytes
            return tokens[begin : begin + size].tobytes()

        return read

    def following(self, span: Span, slots_S: Array, depth: int) -> Array:
        """[S, D]: the `depth` tokens after these matches of the span; at the end of the text, the
        last separator is repeated.
        """
        begin_S1 = self.suffixes_T[span.begin + slots_S].astype(np.int64)[:, None] + span.length
        following_SD: Array = self.tokens_T[np.minimum(begin_S1 + np.arange(depth), len(self.tokens_T) - 1)]
        return following_SD
