"""What a pass of the target costs on this machine: against the number of nodes, and against the weights' bytes over the bandwidth."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eyas.target import Target
from eyas.tree import Tree

__all__ = ["bandwidth", "bytes_per_step", "memory", "peak_memory", "verify_cost"]

NODES = (1, 2, 4, 8, 16, 32, 64)
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
    best = min(_seconds(lambda: numbers.sum(), device) for _ in range(REPEATS))
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


@torch.inference_mode()
def verify_cost(target: Target, context: int = 256, nodes: Sequence[int] = NODES) -> list[dict[str, float]]:
    """Median seconds of one pass over a chain of that many nodes behind `context` committed tokens, one row; interleaved."""
    nodes = [n for n in nodes if n <= max(1, target.context // 2)]
    context = min(context, target.context - max(nodes))
    session = target.open(1)
    session.reserve(context + 2 * max(nodes))
    session.prefill(0, [7 % target.vocab_size] * context)
    shapes = {n: (torch.zeros(1, n, dtype=torch.long, device=target.device), Tree.chain(1, n, target.device)) for n in nodes}
    seconds: dict[int, list[float]] = {n: [] for n in nodes}
    for turn in range(REPEATS + 1):  # the first is the warm-up
        for n, (tokens_1N, tree) in shapes.items():
            took = _seconds(lambda tokens_1N=tokens_1N, tree=tree: session.forward(tokens_1N, tree), target.device)  # type: ignore[misc]
            if turn:
                seconds[n].append(took)
    return [{"nodes": n, "ms": round(1e3 * statistics.median(found), 4)} for n, found in seconds.items()]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
