"""Sorting of all suffixes of a text of tokens, up to a bounded depth, in numpy.

Prefix doubling (Manber and Myers 1993), where only suffixes that are still tied are sorted again
(Larsson and Sadakane 1999). Suffixes that agree in their first `depth` tokens stay in the order of
their positions: a look-up of `depth` tokens cannot tell, and a text that repeats itself takes no
more rounds than another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Array", "order_of"]

Array = np.ndarray[Any, np.dtype[Any]]


def order_of(tokens_T: Array, depth: int) -> Array:
    """uint32 [T]: the positions of the suffixes, sorted by at least their first `depth` tokens.

    It takes fewer than 2^32 tokens and needs about 60 bytes of memory for each.
    """
    T = len(tokens_T)
    bits = max(1, int(tokens_T.max()).bit_length())
    known = min(T, 64 // bits)  # tokens that the keys compare
    key = np.zeros(T, np.uint64)
    for k in range(known):
        key <<= np.uint64(bits)
        key[: T - k] |= tokens_T[k:]
    order = np.argsort(key, kind="stable").astype(np.uint32)
    key = key[order]
    slot = np.arange(T, dtype=np.uint32)  # slots of `order` whose suffixes are tied; at first all
    rank = np.zeros(T + 1, np.uint32)  # by position: 1 + the first slot of its tie; 0 past the end
    while True:
        is_first = np.concatenate([[True], key[1:] != key[:-1]])
        rank[order[slot]] = np.maximum.accumulate(np.where(is_first, slot, 0)) + 1
        slot = slot[~(is_first & np.append(is_first[1:], True))]
        if not len(slot) or known >= depth:
            return order.astype("<u4", copy=False)
        position = order[slot]
        key = rank[position].astype(np.uint64) << np.uint64(32)
        key |= rank[np.minimum(position.astype(np.int64) + known, T)]
        sorting = np.argsort(key, kind="stable")
        order[slot] = position[sorting]
        key = key[sorting]
        known *= 2
