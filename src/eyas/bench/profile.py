"""Where a cycle's time goes, and how far a pass is from the machine's bound: a short run of each of
our methods on one prompt.

    stages   draft -> target -> verify -> commit, and the host: the rest of a cycle. On a GPU every stage is waited for
    levels   time of a draft's first level, which includes reading the accepted tokens, and of each further one: from drafts of two
             depths, because a draft may be a single call of the kernels. Only for dynamic trees
    bound    the roofline: the larger of bytes / bandwidth and flops / rate, both measured here; a pass is faster only where caches hold
             the weights
    trace    of some more cycles, by torch.profiler, for ui.perfetto.dev or chrome://tracing; the stages are ranges named eyas::STAGE

Cycles under the profiler are slower, so none of them is in a figure. This module knows no method
and no report.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from eyas.adaptive.cost import LEVELS, draft_cost
from eyas.bench import cost
from eyas.bench.contestants import Drafting
from eyas.bench.cost import Need
from eyas.bench.rows import stage_ms
from eyas.bench.run import Bench
from eyas.core.dormant import Decision
from eyas.core.engine import Request, StageTimer, Step
from eyas.drafters import Drafter
from eyas.files import write_atomically
from eyas.metrics import cycle_of

__all__ = ["bound", "cycles_of", "profile", "trace_names"]

WARM, CYCLES, TRACED = 3, 24, 6  # cycles that warm up, that are measured, that are traced
ROOM = 16  # new tokens that are asked for each cycle, so that the text does not end before the last one
Timed = Sequence[tuple[Step, float]]


def profile(
    bench: Bench, bandwidth: float | None, rate: float | None, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(contestant, its profile) for each of our methods that can decode after the first prompt;
    traces go into the folder.

    Args:
        bandwidth, rate: bytes and floating-point operations per second of the machine, where they
            are known.
    """
    question = next(bench.questions(bench.prompts[0], bench.temperatures[0]))
    target, request = bench.llm.target, _endless(question.request, bench.llm.target.context)
    timer = partial(_Synchronized, target.device) if target.device.type == "cuda" else StageTimer
    ours = [c for c in bench.contestants if isinstance(c, Drafting) and c.name not in bench.failed]
    for contestant, trace in zip(ours, trace_names([c.name for c in ours]), strict=True):
        timed = list(islice(contestant.timed(request, timer=timer), 1 + WARM + CYCLES))
        figures = cycles_of(timed, len(request.prompt))
        if figures is None:
            continue
        needed = cost.need(target, figures["nodes"], figures["context"])
        figures["levels"] = _levels(contestant.drafter, timed, round(figures["context"]))
        figures["bound"] = bound(needed, bandwidth, rate, figures["ms"])
        _trace(contestant, request, folder / trace)
        yield contestant.name, {**figures, "trace": trace}


def _endless(request: Request, context: int) -> Request:
    """The request without an end, long enough for all cycles."""
    most = ROOM * (1 + WARM + max(CYCLES, TRACED))
    return replace(request, max_new_tokens=min(most, context - len(request.prompt)), eos=frozenset(), stop=None)


def cycles_of(timed: Timed, prompt_tokens: int, warm: int = WARM) -> dict[str, Any] | None:
    """Means over one answer's cycles; None when there are none after those that warm up.

    Cycles in which a policy did not have the method draft are left out and counted, unless there
    are no others.
    """
    committed, cycles = prompt_tokens, list[tuple[Step, float, int]]()
    for step, seconds in timed:
        if not step.prefill:
            cycles.append((step, seconds, committed))
            committed += len(step.tokens)
    cycles = cycles[warm:]
    drafted = [c for c in cycles if _has_draft(c[0])] or cycles
    if not drafted:
        return None
    records = [cycle_of(step, seconds) for step, seconds, _ in drafted]
    ms = stage_ms(records)
    whole = sum(ms.values())
    return {
        "cycles": len(drafted), "plain": sum(not _has_draft(step) for step, *_ in cycles),
        "nodes": round(float(np.mean([r.nodes for r in records])), 2), "context": round(float(np.mean([c for *_, c in drafted])), 1),
        "cycle_ms": round(whole, 4), "ms": {name: round(value, 4) for name, value in ms.items()},
        "percent": {name: round(100 * value / whole, 1) for name, value in ms.items()},
    }  # fmt: skip


def _has_draft(step: Step) -> bool:
    """Whether the method drafted in this cycle."""
    return not isinstance(step.decision, Decision) or step.decision.drafts_every_row


def bound(needed: Need, bandwidth: float | None, rate: float | None, ms: dict[str, float]) -> dict[str, Any] | None:
    """The least time of a pass, which of bytes and flops binds it, and how many times as long the
    pass and the cycle took; None where the machine's figures are unknown.

    Args:
        bandwidth, rate: bytes and floating-point operations per second.
        ms: milliseconds of a cycle, by stage.
    """
    if not bandwidth or not rate:
        return None
    sides = {"bytes": 1e3 * needed.bytes / bandwidth, "flops": 1e3 * needed.flops / rate}
    binds = max(sides, key=lambda side: sides[side])
    return {
        "bytes": round(needed.bytes), "flops": round(needed.flops), **{f"{side}_ms": round(value, 4) for side, value in sides.items()},
        "ms": round(sides[binds], 4), "binds": binds, "pass_over_bound": round(ms["target"] / sides[binds], 3),
        "cycle_over_bound": round(sum(ms.values()) / sides[binds], 3),
    }  # fmt: skip


def _levels(drafter: Drafter, timed: Timed, context: int) -> dict[str, Any] | None:
    """Milliseconds of a draft's levels at the shape that was drafted most often; None for a static
    tree and for one level."""
    shapes = Counter(
        s.decision.tree_size
        for s, _ in timed
        if isinstance(s.decision, Decision) and s.decision.drafts_every_row and s.decision.tree_size is not None
    )
    shape = shapes.most_common(1)[0][0] if shapes else drafter.max_tree
    if shape is None or shape.depth < 2:
        return None
    depth = min(LEVELS, shape.depth)
    seconds = draft_cost(drafter, [shape._replace(depth=1), shape._replace(depth=depth)], context)
    first, whole = (1e3 * seconds[shape._replace(depth=d)] for d in (1, depth))
    return {
        "shape": list(shape),
        "first_ms": round(first, 4),
        "further_ms": round(max(0.0, whole - first) / (depth - 1), 4),
    }


# --- clocks and traces -------------------------------------------------------------------------------


class _Synchronized(StageTimer):
    """A stage lasts until the GPU has finished it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with super().stage(name):
            yield
            torch.cuda.synchronize(self.device)


class _Ranges(StageTimer):
    """Marks stages as ranges for torch.profiler."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with record_function(f"eyas::{name}"), super().stage(name):
            yield


def _trace(contestant: Drafting, request: Request, path: Path) -> None:
    """Write some cycles in Chrome's trace format."""
    steps = contestant.timed(request, timer=_Ranges)
    for _ in islice(steps, 1 + WARM):
        pass
    on_gpu = contestant.drafter.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACED):
            with record_function("eyas::cycle"):
                next(steps, None)
    with TemporaryDirectory() as there:
        profiler.export_chrome_trace(str(Path(there) / path.name))
        with open(Path(there) / path.name, "rb") as written, write_atomically(path) as stream:
            shutil.copyfileobj(written, stream)


def trace_names(methods: Sequence[str]) -> list[str]:
    """A file name for each method, none twice."""
    names = list[str]()
    for method in methods:
        name = re.sub(r"[^\w.+=-]+", "_", method)[:100]
        while f"trace-{name}.json" in names:
            name += "_"
        names.append(f"trace-{name}.json")
    return names
