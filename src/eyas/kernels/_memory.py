"""Memory for packed weights, in huge pages where Linux gives them.

A pass reads all weights, and most of them from main memory. In pages of 2 MiB instead of 4 KiB the processor looks up
fewer addresses, and fetches ahead across the ends of smaller pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

__all__ = ["huge_pages"]

HUGE_PAGE = 2 << 20  # bytes, as on x86-64 and on ARM with pages of 4 KiB
BLOCK = 16 * HUGE_PAGE  # bytes taken from the system at a time; small matrices share them
ALIGNMENT = 64  # each matrix begins at a cache line

_lock = Lock()
_free = torch.empty(0, dtype=torch.uint8, device="cpu")  # the rest of the last block


def huge_pages(size: int) -> Tensor:
    """Return memory for a matrix, uint8, in huge pages where there are any.

    Memory goes back to the system when all tensors of its block are gone.
    """
    global _free
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    # a block that is made in inference mode could not be written to outside of it
    with _lock, torch.inference_mode(False), torch.no_grad():
        if len(_free) < size:
            _free = _block(max(size, BLOCK))
        taken, _free = _free[:size], _free[size + -size % ALIGNMENT :]
        return taken


def _block(size: int) -> Tensor:
    """Return bytes that begin at a huge page, at least `size` of them."""
    size += -size % HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may be built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -block.data_ptr() % HUGE_PAGE
    return block[begin : begin + size]
