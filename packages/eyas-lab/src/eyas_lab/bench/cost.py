"""Bytes and operations of a pass of the target, the machine's bandwidth and rate of operations, and
the memory in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from eyas.core.target import Target
from eyas.passes import seconds_of

__all__ = ["Need", "bandwidth", "bytes_per_step", "flop_rate", "memory", "need", "peak_memory"]

REPEATS = 7


def bytes_per_step(target: Target) -> int:
    """Bytes of weights that one pass reads, in the format in which the runner keeps them. All
    experts count.

    An embedding table that is not the head's too does not: it is read a row at a time.
    """
    if (packed := getattr(target.runner, "bytes", None)) is not None:
        return int(packed)
    return sum(p.numel() * p.element_size() for p in _weights(target))


def _weights(target: Target) -> list[Tensor]:
    """All weights except an embedding table that is not the head's too."""
    embedding, head = target.family.embedding.weight, getattr(target.family.head, "weight", None)
    return [p for p in target.model.parameters() if p is head or p is not embedding]


class Need(NamedTuple):
    """Bytes and floating-point operations that a pass cannot do without."""

    bytes: float  # read: the weights once, and the keys and values of the committed tokens
    # for each node, two for each weight, and in attention two for each query head and each number
    # of the keys and values that it reads
    flops: float


def need(target: Target, nodes: float, context: float) -> Need:
    """Return the need of a pass over `nodes` nodes of one row, after `context` committed tokens.
    All experts count: with experts it needs less."""
    config: Any = target.model.config.get_text_config()
    window, heads = target.family.window, int(config.num_attention_heads)
    every = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [every] * len(target.layout)
    stored = scored = 0.0
    for shape, kind in zip(target.layout, kinds, strict=False):
        if shape is not None:
            kv_heads, *widths = shape
            seen = context if window is None or kind != "sliding_attention" else min(context, window)
            stored += kv_heads * sum(widths) * seen
            scored += heads * sum(widths) * seen
    weights = sum(p.numel() for p in _weights(target))
    return Need(bytes_per_step(target) + stored * target.dtype.itemsize, 2 * nodes * (weights + scored))


def bandwidth(device: torch.device) -> float | None:
    """Bytes per second that this device reads from memory, all threads together: the best of some
    sums over much more than its caches.

    The numbers are random: hardware can be faster on ones. None where the memory is too full to
    measure it.
    """
    for size in (2**31, 2**29, 2**28) if device.type == "cuda" else (2**26,):
        try:
            numbers = torch.empty(size, dtype=torch.float32, device=device).uniform_()
            best = min(_device_seconds(lambda: numbers.sum(), device) for _ in range(REPEATS))  # noqa: B023 - called at once
        except RuntimeError:  # out of memory
            continue
        return numbers.numel() * numbers.element_size() / best
    return None


def _device_seconds(work: Callable[[], object], device: torch.device) -> float:
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


def flop_rate(target: Target) -> float | None:
    """Floating-point operations per second of the target's device in its dtype, all threads together. It is the
    best of some products of matrices, by torch and, on a CPU, by the target's own head, whose integer kernels
    can be faster.

    None where the device has none of this dtype, or no memory for them.
    """
    device = target.device
    size, rows = 8192 if device.type == "cuda" else 1024, 128
    try:
        matrix = torch.empty(size, size, device=device, dtype=target.dtype).normal_(std=size**-0.5)
        rate = 2 * size**3 / min(_device_seconds(lambda: matrix @ matrix, device) for _ in range(REPEATS))
        if device.type == "cpu":
            hidden_MD = torch.randn(rows, target.hidden_size, dtype=target.dtype)
            best = min(seconds_of(lambda: target.head(hidden_MD), device) for _ in range(REPEATS))
            rate = max(rate, 2 * rows * target.hidden_size * target.vocab_size / best)
    except RuntimeError:
        return None
    return rate


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
