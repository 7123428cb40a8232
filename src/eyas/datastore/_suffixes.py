"""The order of all suffixes of a text of tokens, up to a bounded depth, in numpy.

Prefix doubling (Manber, Myers 1993; only what is still undecided is sorted again: Larsson, Sadakane 1999). Suffixes that agree in their
first `depth` tokens stay in the order of their places: nobody who looks at so few tokens sees the difference, and a text that repeats
itself costs no more rounds than another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["order_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def order_of(tokens_T: Array, depth: int) -> Array:
    """uint32 [T]: the places of the suffixes, sorted by their first `depth` tokens at least; fewer than 2^32 tokens.

    About 60 bytes a token of memory while it works.
    """
    T = len(tokens_T)
    bits = max(1, int(tokens_T.max()).bit_length())
    known = min(T, 64 // bits)  # tokens of the first key
    key = np.zeros(T, np.uint64)
    for k in range(known):
        key <<= np.uint64(bits)
        key[: T - k] |= tokens_T[k:]
    order = np.argsort(key, kind="stable").astype(np.uint32)
    key, slot = key[order], np.arange(T, dtype=np.uint32)  # slots of `order` that are not decided; at first all
    rank = np.zeros(T + 1, np.uint32)  # of each place: 1 + the first slot of those that it is equal to; 0 past the end
    while True:
        first = np.concatenate([[True], key[1:] != key[:-1]])
        rank[order[slot]] = np.maximum.accumulate(np.where(first, slot, 0)) + 1
        slot = slot[~(first & np.append(first[1:], True))]
        if not len(slot) or known >= depth:
            return order.astype("<u4", copy=False)
        place = order[slot]
        key = rank[place].astype(np.uint64) << np.uint64(32)
        key |= rank[np.minimum(place.astype(np.int64) + known, T)]
        by = np.argsort(key, kind="stable")
        order[slot], key = place[by], key[by]
        known *= 2
