"""What a pass of the target reads, how fast this machine reads, and the memory that was in use."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from eyas.target import Target
from eyas.tune.cost import seconds_of

__all__ = ["bandwidth", "bytes_per_step", "memory", "peak_memory"]

REPEATS = 7


def bytes_per_step(target: Target) -> int:
    """Bytes of weights that one pass reads: what kernels keep of them, where they run it. Experts count all.

    An embedding table that is not the head's too is read a row at a time.
    """
    if (kept := getattr(target.run, "bytes", None)) is not None:
        return int(kept)
    model = target.model
    embedding: Any = target.family.embedding.weight
    head = getattr(target.family.head, "weight", None)
    skip = 0 if head is embedding else embedding.numel() * embedding.element_size()
    return int(sum(p.numel() * p.element_size() for p in model.parameters()) - skip)


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that this device reads from memory, all threads together: the best of some sums over much more than its caches.

    None where the memory is too full to tell.
    """
    try:
        numbers = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    except RuntimeError:  # out of memory
        return None
    best = min(seconds_of(lambda: numbers.sum(), device) for _ in range(REPEATS))
    return numbers.numel() * numbers.element_size() / best


def memory(device: torch.device) -> int | None:
    """Bytes of the accelerator that are in use, from where its peak is counted anew; None without one."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes that were in use: of the accelerator since `memory` was asked, else of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
