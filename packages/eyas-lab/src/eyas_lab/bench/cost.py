"""Bytes that a pass of the target reads, the machine's bandwidth, and the memory in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

from eyas.core.target import Target
from eyas.passes import seconds_of

__all__ = ["bandwidth", "bytes_per_step", "device_seconds", "memory", "peak_memory"]

REPEATS = 7


def bytes_per_step(target: Target) -> int:
    """Bytes of weights that one pass reads, in the format in which the runner keeps them. All
    experts count.

    An embedding table that is not the head's too does not: it is read a row at a time.
    """
    if (packed := getattr(target.runner, "bytes", None)) is not None:
        return int(packed)
    embedding, head = target.family.embedding.weight, getattr(target.family.head, "weight", None)
    weights = (p for p in target.model.parameters() if p is head or p is not embedding)
    return sum(p.numel() * p.element_size() for p in weights)


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that this device reads from memory, all threads together: the best of some
    sums over much more than its caches.

    The numbers are random: hardware can be faster on ones. None where the memory is too full to
    measure it.
    """
    for size in (2**31, 2**29, 2**28) if device.type == "cuda" else (2**26,):
        try:
            numbers = torch.empty(size, dtype=torch.float32, device=device).uniform_()
            best = min(device_seconds(lambda: numbers.sum(), device) for _ in range(REPEATS))  # noqa: B023 - called at once
        except RuntimeError:  # out of memory
            continue
        return numbers.numel() * numbers.element_size() / best
    return None


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes on the device: on a GPU between two events, so that its launch by
    the host does not count."""
    if device.type != "cuda":
        return seconds_of(work, device)
    with torch.cuda.device(device):
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def memory(device: torch.device) -> int | None:
    """Bytes in use on the accelerator; its peak is counted again from here. None without one."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use: on the accelerator since the last call of `memory`, else of the process
    since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
