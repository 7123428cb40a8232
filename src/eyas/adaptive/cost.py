"""What this machine takes, in seconds: a pass of the target against its nodes, a draft against levels and branch, and all the rest of a
cycle. Measured in a few seconds where it is asked for the first time, and kept in the user's cache folder.

    cycle(nodes, depth, branch)  =  verify(nodes)  +  first(branch) + (depth - 1) * deeper(branch)  +  rest

between what was measured, straight lines. Of several rows a pass has as many nodes as all of them together. Costs are ratios more than
clocks: who reads them (governor.py) scales them by what cycles really take, so a busy minute, another context or a slower clock do no harm.

What is kept is valid for one target, method, size of head, dtype, device, number of threads, way to run forwards, and versions. A file that
is broken or of something else is not read but measured anew. This module knows no acceptance.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eyas.adaptive.dormant import AdaptiveDrafter, Decision, Policy
from eyas.core.drafter import method_name
from eyas.core.engine import Decoder, Request, Step
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import TargetOutput, Tree, Verdict
from eyas.drafters import CycleInput, Drafter, Shape
from eyas.files import parse_json, replaced, user_cache
from eyas.hardware import cpu_name, versions

__all__ = ["Costs", "draft_cost", "key_of", "measure", "place_of", "remembered", "seconds_of", "verify_cost"]

log = logging.getLogger(__name__)  # the command line shows what it says

FORMAT = 2
NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)  # close where a tile of the kernels holds so many and not one more
BRANCHES = (1, 2, 4, 8)
LEVELS = 4  # of the deeper one of two drafts that tell what a level takes
REPEATS = 7
BUDGET = 2.0  # seconds, after which a measurement is not repeated any more
CONTEXT = 256  # committed tokens behind which is measured


@dataclass(frozen=True)
class Costs:
    """Seconds, of one row."""

    context: int  # committed tokens
    nodes: tuple[int, ...]
    verify: tuple[float, ...]  # a pass over so many nodes
    branches: tuple[int, ...]
    first: tuple[float, ...]  # a draft of one level, with so many children per node
    deeper: tuple[float, ...]  # each further level
    plain_rest: float  # of a cycle without a draft, beside its pass
    rest: float  # of a cycle with one, beside draft and pass

    def plain(self, rows: int = 1) -> float:
        """A cycle without a draft."""
        return _line(self.nodes, self.verify, rows) + self.plain_rest

    def draft(self, depth: int, branch: int, rows: int = 1) -> float:
        first, deeper = (_line(self.branches, costs, branch * rows) for costs in (self.first, self.deeper))
        return first + (depth - 1) * deeper

    def cycle(self, shape: Shape, rows: int = 1) -> float:
        return _line(self.nodes, self.verify, shape.nodes * rows) + self.draft(shape.depth, shape.branch, rows) + self.rest

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """ValueError, KeyError or TypeError for what is none."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        costs = cls(**values)
        seconds = (*costs.verify, *costs.first, *costs.deeper, costs.plain_rest, costs.rest)
        if not all(isinstance(s, float) and math.isfinite(s) and s >= 0 for s in seconds) or not costs.verify or min(costs.verify) <= 0:
            raise ValueError("no times")
        if [len(costs.nodes), len(costs.branches)] != [len(costs.verify), len(costs.deeper)] or len(costs.first) != len(costs.deeper):
            raise ValueError("times are missing")
        if not all(isinstance(n, int) and n > 0 for n in (*costs.nodes, *costs.branches)) or not costs.branches:
            raise ValueError("no sizes")
        return costs


def _line(at: Sequence[int], values: Sequence[float], x: float) -> float:
    """Between two measured points the straight line; beyond the last that of the last two, never falling."""
    if x <= at[0] or len(at) == 1:
        return values[0] if x <= at[0] else values[0] * x / at[0]
    i = next((i for i in range(1, len(at)) if x <= at[i]), len(at) - 1)
    slope = (values[i] - values[i - 1]) / (at[i] - at[i - 1])
    return values[i] + (max(0.0, slope) if x > at[i] else slope) * (x - at[i])


# --- measuring -------------------------------------------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Of some work, to its end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _medians(jobs: dict[Any, Callable[[], float]]) -> dict[Any, float]:
    """Median seconds of each job, interleaved: drift hits all alike. The first turn warms up; turns end when the budget is used up."""
    found: dict[Any, list[float]] = {name: [] for name in jobs}
    began = time.perf_counter()
    for turn in range(REPEATS + 1):
        if turn > 1 and time.perf_counter() - began > BUDGET:
            break
        for name, job in jobs.items():
            found[name].append(job())
    return {name: median(seconds[1:]) for name, seconds in found.items()}


@torch.inference_mode()
def verify_cost(
    target: Target, context: int = CONTEXT, nodes: Sequence[int] = NODES, feature_layers: tuple[int, ...] = ()
) -> list[dict[str, float]]:
    """Median milliseconds of one pass over a chain of that many nodes behind `context` committed tokens, one row; interleaved."""
    nodes = [n for n in nodes if n <= max(1, target.context // 2)]
    context = min(context, target.context - max(nodes))
    session = target.open(1, feature_layers)
    session.reserve(context + 2 * max(nodes))
    session.prefill(0, _text(target, context))

    def job(n: int) -> Callable[[], float]:
        tokens_1N, tree = torch.zeros(1, n, dtype=torch.long, device=target.device), Tree.chain(1, n, target.device)
        return lambda: seconds_of(lambda: session.forward(tokens_1N, tree), target.device)

    return [{"nodes": n, "ms": round(1e3 * s, 4)} for n, s in _medians({n: job(n) for n in nodes}).items()]


def _text(target: Target, length: int) -> list[int]:
    return [7 % target.vocab_size] * length


@torch.inference_mode()
def draft_cost(drafter: Drafter, shapes: Sequence[Shape], context: int = CONTEXT) -> dict[Shape, float]:
    """Median seconds of a draft of each shape behind so many committed tokens, one row; interleaved. Nothing is accepted."""
    target, session = drafter.target, drafter.open(1)
    context = max(1, min(context, target.context - (REPEATS + 2) * len(shapes) - 64))
    session.begin(0, 0, context)
    target.open(1, drafter.feature_layers).prefill(0, _text(target, context), lambda *chunk: session.prefill(0, *chunk))
    position, one_1, law = context, torch.ones(1, dtype=torch.long, device=target.device), (Sampling(),)

    def cycle(shape: Shape) -> float:
        nonlocal position
        noise, at_1 = GumbelNoise.of(law, target.device), position * one_1
        roots = CycleInput(7 % target.vocab_size * one_1, at_1, one_1 > 0, law, noise, position, active_rows=(0,), tree_shape=shape)
        drafts = []
        took = seconds_of(lambda: drafts.append(session.draft(roots)), target.device)
        (draft,) = drafts
        position += 1
        N, path_1P = draft.tree.nodes, torch.full((1, draft.tree.max_depth + 1), -1, device=target.device)
        path_1P[0, 0] = 0
        width = target.hidden_size * len(drafter.feature_layers)
        seen = TargetOutput(_zeros(target, N, target.vocab_size), _zeros(target, N, width))
        session.commit(draft, Verdict(path_1P, path_1P.clamp(min=0) + roots.tokens_B, one_1, roots.tokens_B), seen)
        return took

    return _medians({shape: partial(cycle, shape) for shape in shapes})


def _zeros(target: Target, nodes: int, width: int) -> Tensor:
    return torch.zeros(1, nodes, width, dtype=target.dtype, device=target.device)


class _Fixed(Policy):
    """Cycles of one shape and plain ones by turns."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.plain = shape, False

    def decide(self, roots: CycleInput) -> Decision:
        self.plain = not self.plain
        return Decision(self.shape, frozenset(roots.active_rows) if self.plain else frozenset())

    def observe(self, steps: Sequence[Step]) -> None:
        pass


def _cycles(drafter: Drafter, shape: Shape, context: int) -> tuple[list[Step], list[Step]]:
    """Plain cycles and drafted ones of this shape, by turns, the first of each left out: it warms up, or records."""
    decoder = Decoder(drafter.target, AdaptiveDrafter(drafter, _Fixed(shape)))
    new = (2 * REPEATS + 2) * (1 + shape.depth)
    decoder.add(Request(tuple(_text(drafter.target, max(1, min(context, drafter.target.context - new)))), new))
    plain, drafted = list[Step](), list[Step]()
    began = time.perf_counter()
    while not decoder.finished and (len(drafted) < 3 or time.perf_counter() - began < BUDGET):
        for step in decoder.step():
            if not step.prefill:
                (plain if step.plan == "plain" else drafted).append(step)
    return plain[1:] or plain, drafted[1:] or drafted


def _recorded_draft_cost(drafter: Drafter, shape: Shape, nodes: Sequence[int], verify: Sequence[float]) -> float:
    """Seconds of a draft that is recorded with the rest of its cycle: what the cycle takes beyond a pass."""
    _, drafted = _cycles(drafter, shape, CONTEXT)
    return max(0.0, median(s.seconds - _line(nodes, verify, s.draft.tree.nodes) for s in drafted if s.draft is not None))


def _is_dormant(drafter: Drafter, costs: Costs, shape: Shape) -> tuple[float, float]:
    """Median seconds of a cycle beside draft and pass: of a plain one, and of one with a draft."""
    on_cpu = drafter.target.device.type == "cpu"  # elsewhere the stages only say when work was handed over

    def rest(step: Step, known: float) -> float:
        known = step.parts.get("draft", 0.0) + step.parts.get("target", 0.0) if on_cpu else known
        return max(0.0, step.seconds - known)

    plain, drafted = _cycles(drafter, shape, costs.context)
    return median(rest(s, costs.plain()) for s in plain), median(rest(s, costs.cycle(shape)) for s in drafted)


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """More never takes less: what says so was held up by the machine."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


def measure(drafter: Drafter) -> Costs:
    """The costs of a method that grows its trees."""
    limit, target = drafter.max_tree, drafter.target
    assert limit is not None
    curve = verify_cost(target, feature_layers=drafter.feature_layers)
    branches = sorted({min(b, limit.branch) for b in (*BRANCHES, limit.branch)})
    levels, nodes = min(LEVELS, limit.depth), min(16, limit.nodes)
    shapes = [Shape(nodes, depth, b) for b in branches for depth in sorted({1, levels})]
    passes = tuple(int(row["nodes"]) for row in curve), _rising([row["ms"] / 1e3 for row in curve])
    recorded = target.run.name.endswith("graphs")
    found = {s: _recorded_draft_cost(drafter, s, *passes) for s in shapes} if recorded else draft_cost(drafter, shapes)
    first, last = (_rising([found[Shape(nodes, depth, b)] for b in branches]) for depth in (1, levels))
    deeper = [max(0.0, long - short) / max(1, levels - 1) for short, long in zip(first, last, strict=True)]
    costs = Costs(CONTEXT, *passes, tuple(branches), first, tuple(deeper), 0.0, 0.0)
    plain_rest, rest = _is_dormant(drafter, costs, Shape(nodes, levels, min(2, limit.branch)))
    return replace(costs, plain_rest=plain_rest, rest=rest)


# --- remembering -----------------------------------------------------------------------------------------------------------------------


def key_of(drafter: Drafter) -> dict[str, Any]:
    """What costs depend on."""
    target, device = drafter.target, drafter.target.device
    return {
        "format": FORMAT, "target": target.fingerprint(), "model": type(target.model).__name__, "method": method_name(drafter),
        "options": repr(drafter.options),
        "head": None if drafter.net is None else sum(p.numel() for p in drafter.net.parameters()), "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device), "cpu": cpu_name(),
        "threads": target.run.threads or torch.get_num_threads(),
        "run": target.run.name, **asdict(target.run.form), "draft_weights": target.draft_weights, "versions": versions(),
    }  # fmt: skip


def place_of(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache() / f"tune-{name}.json"


def remembered(drafter: Drafter, force: bool = False, make: Callable[[Drafter], Costs] = measure) -> tuple[Costs, bool]:
    """The costs, and whether they had been measured before. `force`: measure them anew."""
    key = key_of(drafter)
    path = place_of(key)
    if not force:
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # not there yet, or not whole
            found = parse_json(path.read_bytes())
            if found["key"] == key:
                return Costs.from_json(found["costs"]), True
    log.info(
        "passes and drafts of %s are timed on this machine, once: some seconds (a tree of fixed size goes without)", method_name(drafter)
    )
    costs = make(drafter)
    with suppress(OSError):  # then they are measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as stream:
            stream.write((json.dumps({"key": key, "costs": asdict(costs)}) + "\n").encode())
    return costs, False
