"""Seconds of passes of the target and of drafts on this machine, measured.

`eyas tune`, `eyas accelerate` and benches measure by it. This module knows no method and no acceptance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from eyas.core.drafter import CycleInput, Drafter, TreeSize
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import TargetOutput, Tree, Verdict

__all__ = [
    "CONTEXT",
    "MAX_SECONDS",
    "NODES",
    "REPEATS",
    "TOKEN_ID",
    "Timings",
    "repeated_token",
    "seconds_of",
    "spread_of",
    "time_drafts",
    "time_jobs",
    "time_passes",
    "verify_cost",
]

NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # dense where one more node fills a kernel's tile
MIN_LARGEST = 16  # a pass over so many nodes or more may be the largest that is timed
REPEATS = 7
MAX_SECONDS = 4.0  # time after which nothing is repeated any more
CONTEXT = 256  # committed tokens before the measured passes
TOKEN_ID = 7  # the token that measured texts consist of; any one will do


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work, to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class Timings(NamedTuple):
    """Seconds by job: medians and their typical spread, and the fastest, which other processes disturb least."""

    medians: dict[Any, float]
    spread: float
    fastest: Mapping[Any, float] = MappingProxyType({})


def time_jobs(jobs: dict[Any, Callable[[], float]]) -> Timings:
    """Run each job several times, interleaved, so that drift of the machine affects all jobs
    equally. The first round warms up."""
    seconds: dict[Any, list[float]] = {name: [] for name in jobs}
    began = time.perf_counter()
    for turn in range(REPEATS + 1):
        if turn > 1 and time.perf_counter() - began > MAX_SECONDS:
            break
        for name, job in jobs.items():
            seconds[name].append(job())
    return Timings(
        {name: median(values[1:]) for name, values in seconds.items()},
        median(map(spread_of, seconds.values())),
        {name: min(values[1:]) for name, values in seconds.items()},
    )


def spread_of(seconds: Sequence[float]) -> float:
    """Return the interquartile range over the median, the first timing left out."""
    if len(seconds) < 3:
        return 0.0
    low, middle, high = quantiles(seconds[1:], n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def verify_cost(target: Target, context: int = CONTEXT, nodes: Sequence[int] = NODES) -> list[dict[str, float]]:
    """Return the median milliseconds of a target pass over a chain of each number of nodes after `context`
    tokens, one row."""
    timings = time_passes(target, context, nodes, ())
    return [{"nodes": n, "ms": round(1e3 * seconds, 4)} for n, seconds in timings.medians.items()]


@torch.inference_mode()
def time_passes(
    target: Target, context: int, nodes: Sequence[int], feature_layers: tuple[int, ...], max_seconds: float = math.inf
) -> Timings:
    """Time passes of every number of nodes, up to the first of MIN_LARGEST or more that takes `max_seconds`."""
    nodes = [n for n in nodes if n <= max(1, target.context // 2)]
    context = min(context, target.context - max(nodes))
    session = target.open(1, feature_layers)
    session.reserve(context + 2 * max(nodes))
    session.prefill(0, repeated_token(target, context))

    def job(n: int) -> Callable[[], float]:
        tokens_1N = torch.zeros(1, n, dtype=torch.long, device=target.device)
        tree = Tree.chain(1, n, target.device)
        return lambda: seconds_of(lambda: session.forward(tokens_1N, tree), target.device)

    jobs: dict[int, Callable[[], float]] = {}
    for n in nodes:
        jobs[n] = job(n)
        if n >= MIN_LARGEST and jobs[n]() > max_seconds:
            break
    return time_jobs(jobs)


@torch.inference_mode()
def time_drafts(drafter: Drafter, sizes: Sequence[TreeSize], context: int = CONTEXT, rows: int = 1) -> Timings:
    """Time a draft of each size in all rows, after `context` tokens. Nothing is accepted."""
    target, session = drafter.target, drafter.open(rows)
    context = max(1, min(context, target.context - (REPEATS + 2) * len(sizes) - 64))
    opened = target.open(rows, drafter.feature_layers)
    for row in range(rows):
        session.begin(row, 0, context)
        opened.prefill(row, repeated_token(target, context), lambda *chunk, row=row: session.prefill(row, *chunk))
    position, one_B = context, torch.ones(rows, dtype=torch.long, device=target.device)
    sampling, tokens_B = (Sampling(),) * rows, TOKEN_ID % target.vocab_size * one_B
    noise = GumbelNoise.from_sampling(sampling, target.device)

    def cycle(size: TreeSize) -> float:
        nonlocal position
        cycle_input = CycleInput(
            tokens_B,
            position * one_B,
            one_B > 0,
            sampling,
            noise,
            position,
            active_rows=tuple(range(rows)),
            target_cache=opened.cache,
            tree_size=size,
        )
        drafts = []
        took = seconds_of(lambda: drafts.append(session.draft(cycle_input)), target.device)
        (draft,) = drafts
        position += 1
        N, path_BP = draft.tree.nodes, torch.full((rows, draft.tree.max_depth + 1), -1, device=target.device)
        path_BP[:, 0] = 0
        widths = (target.vocab_size, target.hidden_size * len(drafter.feature_layers))
        zeros = (torch.zeros(rows, N, width, dtype=target.dtype, device=target.device) for width in widths)
        output = TargetOutput(*zeros)
        session.commit(draft, Verdict(path_BP, path_BP.clamp(min=0) + tokens_B[:, None], one_B, tokens_B), output)
        return took

    return time_jobs({size: partial(cycle, size) for size in sizes})


def repeated_token(target: Target, length: int) -> list[int]:
    """Return a text of this length for measurements: one token again and again."""
    return [TOKEN_ID % target.vocab_size] * length
