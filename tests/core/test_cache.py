"""Keys and values in memory."""

from __future__ import annotations

import torch

from eyas.core.cache import KVCache, Layout

LAYOUT: Layout = ((2, 8, 8), None, (1, 4, 6), (2, 8, 8))  # the second layer stores nothing of its own


def test_bytes_are_those_that_are_reserved() -> None:
    """Guards the limit of what a decoder keeps between requests: the bytes are those of all layers and all rows."""
    for rows, dtype in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        cache = KVCache(LAYOUT, rows, dtype, torch.device("cpu"))
        for slots in (256, 512):
            cache.reserve(slots)
            assert cache.bytes_for(slots) == sum(store.nbytes for store in cache.stores)
