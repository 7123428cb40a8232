"""One text of tokens with the order of its suffixes: where does a pattern stand, and what follows it there?

    tokens     documents, each followed by SEPARATOR, which is no token; stored with the high byte first, so that comparing bytes is
               comparing tokens
    suffixes   the places of all suffixes, sorted by their first `depth` tokens

The places at which a pattern stands are neighbours among the suffixes: two binary searches find them. And they are sorted by what follows.

Letters: T tokens, S matches, D tokens after a match. This module knows no file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from eyas.datastore._suffixes import order_of

__all__ = ["Array", "Segment", "Span", "dtype_for", "joined", "separator_of", "together"]

Array = np.ndarray[Any, np.dtype[Any]]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Two bytes a token where its ids and the separator fit into them."""
    return np.dtype(">u2" if vocab_size < 1 << 16 else ">u4")


def separator_of(dtype: np.dtype[Any]) -> int:
    """What stands behind every document: the largest value, which is no token."""
    return int(np.iinfo(dtype).max)


def joined(documents: Iterable[Sequence[int]], dtype: np.dtype[Any]) -> Array:
    """[T]: documents end to end, each with its separator."""
    end = np.array([separator_of(dtype)], dtype)
    return together([part for document in documents for part in (np.asarray(document, dtype), end)], dtype)


def together(parts: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Arrays end to end. (np.concatenate alone would give the machine's own order of bytes.)"""
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)


class Span(NamedTuple):
    """Matches of a pattern: `suffixes[begin:end]` all start with these `length` tokens."""

    length: int
    begin: int
    end: int


class Segment:
    """Tokens and suffixes, in memory or mapped from files."""

    def __init__(self, tokens_T: Array, suffixes_T: Array) -> None:
        assert tokens_T.dtype in (np.dtype(">u2"), np.dtype(">u4")), "the high byte first"
        # plain arrays over the same memory: np.memmap's own indexing is slow
        self.tokens_T, self.suffixes_T = tokens_T.view(np.ndarray), suffixes_T.view(np.ndarray)
        self.width = self.tokens_T.dtype.itemsize
        self._bytes = self.tokens_T.view(np.uint8).data

    @classmethod
    def of(cls, tokens_T: Array, depth: int) -> Segment:
        """Sorts the suffixes."""
        return cls(tokens_T, order_of(tokens_T, depth))

    def longest(self, context: Sequence[int], shortest: int, longest: int) -> Span | None:
        """The matches of the longest end of the context, of `shortest` to `longest` tokens, that stands here; None when none does.

        A shorter end stands wherever a longer one does, so the length is found by bisection too.
        """
        longest = min(longest, len(context))
        pattern = np.asarray(context[len(context) - longest :], self.tokens_T.dtype).tobytes()
        low, high, begin = shortest - 1, longest, 0
        while low < high:
            length = (low + high + 1) // 2 if low >= shortest else shortest
            end = pattern[(longest - length) * self.width :]
            at = bisect_left(range(len(self.suffixes_T)), end, key=self._reader(len(end)))
            if at < len(self.suffixes_T) and self._reader(len(end))(at) == end:
                low, begin = length, at
            else:
                high = length - 1
        if low < shortest:
            return None
        end = pattern[(longest - low) * self.width :]
        return Span(low, begin, bisect_right(range(len(self.suffixes_T)), end, lo=begin, key=self._reader(len(end))))

    def _reader(self, size: int) -> Any:
        """slot -> the first `size` bytes of its suffix."""
        read, place, width = self._bytes, self.suffixes_T.item, self.width

        def first(slot: int) -> bytes:
            begin = place(slot) * width
            return read[begin : begin + size].tobytes()

        return first

    def following(self, span: Span, slots_S: Array, depth: int) -> Array:
        """[S, D]: the `depth` tokens that follow these matches of the span; at the end of the text the separator goes on."""
        place_S1 = self.suffixes_T[span.begin + slots_S].astype(np.int64)[:, None] + span.length
        following_SD: Array = self.tokens_T[np.minimum(place_S1 + np.arange(depth), len(self.tokens_T) - 1)]
        return following_SD
