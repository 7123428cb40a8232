"""Seconds of target passes and drafts on this machine, as `--tree auto` needs them to compare trees.

    cycle(nodes, depth, branch)  =  verify(nodes)  +  first(branch) + (depth - 1) * deeper(branch)  +  rest

Between measured points costs are linear. With several rows, a pass has as many nodes as all rows
together. Where trees do not grow, a cycle with the method's own tree is measured; where the text drafts, the passes
alone. Costs serve as ratios: the controller scales them by the measured time of cycles.

Measuring takes a few seconds, on first use, and is kept in the user's cache folder. A measurement knows how busy the
machine was and how much its repetitions differed. A doubtful one expires after DOUBTFUL_SECONDS, and
`eyas bench` does not use it at all: two methods that are compared need like trees.

This module knows nothing about acceptance.
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
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeVar

import torch

from eyas import passes
from eyas.core.dormant import AdaptiveDrafter, Decision, Policy
from eyas.core.drafter import CycleInput, Drafter, TreeSize, method_name
from eyas.core.engine import Decoder, Request, Step
from eyas.core.requests import check_steps
from eyas.files import parse_json, user_cache, write_atomically
from eyas.hardware import cpu_name, versions
from eyas.hardware.machine import snapshot, used
from eyas.passes import CONTEXT, NODES, Timings, repeated_token, time_drafts, time_passes
from eyas.targets.fingerprints import fingerprint

__all__ = [
    "DOUBTFUL_SECONDS",
    "LEVELS",
    "MAX_OTHERS",
    "Costs",
    "KeptFile",
    "cost_key",
    "cost_path",
    "load_costs",
    "measure",
]

log = logging.getLogger(__name__)  # the command line shows its messages

Value = TypeVar("Value")

FORMAT = 6  # version of the file format; files of another version are not read
PASS_SECONDS = 0.25  # no larger pass is timed than the first that takes so long
BRANCHES = (1, 2, 4, 8)
OWN_DEPTH = 8  # assumed depth of trees that do not grow
ROWS = 4  # rows of the drafts that show what a level of many tokens takes
LEVELS = 4  # depth of the deeper of two timed drafts; their difference gives the time per level
SPREAD_LIMIT = 0.25  # a larger spread is doubtful
MAX_OTHERS = 0.25  # share of the cores' time that others may use meanwhile; more is doubtful
DOUBTFUL_SECONDS = 600  # how long a doubtful measurement is used


@dataclass(frozen=True)
class Costs:
    """Seconds of passes and drafts of one row, and the quality of the measurement."""

    context: int  # committed tokens
    nodes: tuple[int, ...]
    verify: tuple[float, ...]  # seconds of a target pass, by `nodes`
    branches: tuple[int, ...]
    first: tuple[float, ...]  # seconds of a draft of one level, by `branches`
    deeper: tuple[float, ...]  # seconds of each further level, by `branches`
    plain_rest: float  # seconds of a plain cycle besides the pass
    rest: float  # seconds of a drafted cycle besides the pass and the draft
    spread: float = 0.0  # interquartile range of repeated timings over their median; the median of all timings
    others: float = 0.0  # share of the cores' time that other processes used meanwhile
    measured_at: float = 0.0  # seconds since the epoch
    own_nodes: int = 1  # nodes of the tree of a method whose trees do not grow; its draft is one of a single level

    @property
    def doubtful(self) -> bool:
        """Whether other processes may have distorted the ratios."""
        return self.spread > SPREAD_LIMIT or self.others > MAX_OTHERS

    @property
    def quality(self) -> str:
        """Return one sentence on how far the timings can be trusted."""
        text = f"other processes used {self.others:.0%} of the cores, repeated timings within {self.spread:.0%}"
        return f"doubtful: {text}" if self.doubtful else text

    def expired(self, now: float, doubtful_seconds: float = DOUBTFUL_SECONDS) -> bool:
        """Return whether it must be measured again at the time `now`, in seconds since the epoch."""
        return self.doubtful and not 0 <= now - self.measured_at < doubtful_seconds

    def plain(self, rows: int = 1) -> float:
        """Return the seconds of a plain cycle for a batch of `rows`."""
        return _interpolate(self.nodes, self.verify, rows) + self.plain_rest

    def draft(self, depth: int, branch: int, rows: int = 1) -> float:
        """Return the seconds of drafting a tree of this depth and branching for a batch of `rows`."""
        first, deeper = (_interpolate(self.branches, costs, branch * rows) for costs in (self.first, self.deeper))
        return first + (depth - 1) * deeper

    def cycle(self, size: TreeSize | None, rows: int = 1) -> float:
        """Return the seconds of a cycle with a tree of this size in each row; None stands for a tree that does not
        grow."""
        size = size or TreeSize(self.own_nodes, 1, 1)
        verified = _interpolate(self.nodes, self.verify, size.nodes * rows)
        return verified + self.draft(size.depth, size.branch, rows) + self.rest

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Costs:
        """Return the costs that `asdict` made these fields of; ValueError, KeyError or TypeError for
        anything else."""
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        costs = cls(**values)
        seconds = (*costs.verify, *costs.first, *costs.deeper, costs.plain_rest, costs.rest)
        numbers = (*seconds, costs.spread, costs.others, costs.measured_at)
        counts = (*costs.nodes, *costs.branches, costs.own_nodes)
        are_numbers = all(isinstance(x, float) and 0 <= x < math.inf for x in numbers) and min(costs.verify) > 0
        are_counts = all(isinstance(n, int) and n > 0 for n in counts)
        same = (
            len(costs.nodes) == len(costs.verify) and len(costs.branches) == len(costs.first) == len(costs.deeper) > 0
        )
        if not (are_numbers and are_counts and same):
            raise ValueError("times or sizes are missing, or are not positive numbers")
        return costs


def _interpolate(at: Sequence[int], values: Sequence[float], x: float) -> float:
    """Return the value at a point: linear between measured points; beyond the last one as between the last two, but
    never falling."""
    if x <= at[0] or len(at) == 1:
        return values[0] if x <= at[0] else values[0] * x / at[0]
    i = next((i for i in range(1, len(at)) if x <= at[i]), len(at) - 1)
    slope = (values[i] - values[i - 1]) / (at[i] - at[i - 1])
    return values[i] + (max(0.0, slope) if x > at[i] else slope) * (x - at[i])


class _Alternating(Policy):
    """Cycles with a tree of one size and plain ones by turns. None: the size that the options give."""

    def __init__(self, size: TreeSize | None) -> None:
        self.size, self.plain = size, False

    def decide(self, cycle_input: CycleInput) -> Decision:
        self.plain = not self.plain
        return Decision(self.size, frozenset(cycle_input.active_rows) if self.plain else frozenset())

    def observe(self, steps: Sequence[Step]) -> None:
        pass


def _cycles(drafter: Drafter, size: TreeSize | None, context: int) -> tuple[list[Step], list[Step]]:
    """Return the steps of plain cycles and of drafted ones, by turns. The first of each is left out: it warms up, or
    records."""
    decoder = Decoder(drafter.target, AdaptiveDrafter(drafter, _Alternating(size)))
    new = min((2 * passes.REPEATS + 2) * (1 + (OWN_DEPTH if size is None else size.depth)), drafter.target.context - 1)
    decoder.add(Request(tuple(repeated_token(drafter.target, max(1, min(context, drafter.target.context - new)))), new))
    plain, drafted = list[Step](), list[Step]()
    began = time.perf_counter()
    while not decoder.finished and (len(drafted) < 3 or time.perf_counter() - began < passes.MAX_SECONDS):
        for step in check_steps(decoder.step()):
            if not step.prefill:
                (plain if step.drafted_by == "plain" else drafted).append(step)
    return plain[1:] or plain, drafted[1:] or drafted


def _recorded_draft_cost(drafter: Drafter, size: TreeSize, nodes: Sequence[int], verify: Sequence[float]) -> float:
    """Return the seconds of a draft that is recorded together with the rest of its cycle: the cycle's seconds less the
    seconds of its pass."""
    steps = [(step, step.draft) for step in _cycles(drafter, size, CONTEXT)[1] if step.draft is not None]
    return max(0.0, median(step.seconds - _interpolate(nodes, verify, draft.tree.nodes) for step, draft in steps))


def _overheads(drafter: Drafter, costs: Costs, size: TreeSize) -> tuple[float, float]:
    """Return the median seconds of a cycle besides pass and draft: of a plain one, and of one with a draft."""
    on_cpu = drafter.target.device.type == "cpu"  # on other devices a stage ends when its work is queued

    def rest(step: Step, known: float) -> float:
        known = step.stage_seconds.get("draft", 0.0) + step.stage_seconds.get("target", 0.0) if on_cpu else known
        return max(0.0, step.seconds - known)

    plain, drafted = _cycles(drafter, size, costs.context)
    return median(rest(s, costs.plain()) for s in plain), median(rest(s, costs.cycle(size)) for s in drafted)


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Make timings non-decreasing in size: a smaller size that took longer was disturbed."""
    return tuple(accumulate(reversed(seconds), min))[::-1]


def measure(drafter: Drafter) -> Costs:
    """Measure the costs of a method, and how much others used the machine meanwhile."""
    before, now = snapshot(), time.time()
    costs = replace(_measure(drafter), others=used(before).share, measured_at=now)
    log.info("measured passes of this model for %.1f s, once, within the time of this answer", time.time() - now)
    return costs


def _measure(drafter: Drafter) -> Costs:
    limit, target = drafter.max_tree, drafter.target
    measured = time_passes(target, CONTEXT, NODES, drafter.feature_layers, PASS_SECONDS)
    nodes, verify = tuple(measured.medians), _rising(list(measured.medians.values()))
    if limit is None:
        costs = Costs(CONTEXT, nodes, verify, (1,), (0.0,), (0.0,), 0.0, 0.0, measured.spread)
        return costs if drafter.chooses_nodes else _with_own_tree(drafter, costs)
    branches = sorted({min(b, limit.branch) for b in (*BRANCHES, limit.branch)})
    levels, drafted_nodes = min(LEVELS, limit.depth), min(16, limit.nodes)
    sizes = {b: [TreeSize(drafted_nodes, depth, b) for depth in (1, levels)] for b in branches}
    every_size = list(dict.fromkeys(size for pair in sizes.values() for size in pair))
    if target.runner.records_cycles:
        drafts = Timings({size: _recorded_draft_cost(drafter, size, nodes, verify) for size in every_size}, 0.0)
    else:
        drafts = time_drafts(drafter, every_size)
    pairs = [[drafts.medians[size] for size in pair] for pair in sizes.values()]
    if not target.runner.records_cycles:  # a level of many rows has more tokens than one of the widest tree
        several = time_drafts(drafter, list(dict.fromkeys(sizes[branches[-1]])), rows=ROWS).medians
        branches.append(ROWS * branches[-1])
        pairs.append([several[size] for size in sizes[branches[-2]]])
    first, last = (_rising(seconds) for seconds in zip(*pairs, strict=True))
    deeper = [max(0.0, long - short) / max(1, levels - 1) for short, long in zip(first, last, strict=True)]
    spread = max(measured.spread, drafts.spread)
    costs = Costs(CONTEXT, nodes, verify, tuple(branches), first, tuple(deeper), 0.0, 0.0, spread)
    plain_rest, rest = _overheads(drafter, costs, TreeSize(drafted_nodes, levels, min(2, limit.branch)))
    return replace(costs, plain_rest=plain_rest, rest=rest)


def _with_own_tree(drafter: Drafter, costs: Costs) -> Costs:
    """Return the costs, with the costs of the trees that the method always drafts added."""
    plain, drafted = _cycles(drafter, None, costs.context)
    if not (plain and drafted):  # a context of some tokens
        return costs
    own_nodes = max(step.draft.tree.nodes for step in drafted if step.draft is not None)
    first = max(0.0, median(step.seconds for step in drafted) - _interpolate(costs.nodes, costs.verify, own_nodes))
    rest = max(0.0, median(step.seconds for step in plain) - costs.plain())
    return replace(costs, own_nodes=own_nodes, first=(first,), plain_rest=rest)


def cost_key(drafter: Drafter) -> dict[str, Any]:
    """Return all on which measured costs depend: target, method, options, head, dtype and machine."""
    target, device = drafter.target, drafter.target.device
    return {
        "format": FORMAT,
        "target": fingerprint(target),
        "model": type(target.model).__name__,
        "method": method_name(drafter),
        "options": repr(drafter.options),
        "head": None if drafter.net is None else sum(p.numel() for p in drafter.net.parameters()),
        "dtype": str(target.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "cpu": cpu_name(),
        "threads": target.runner.threads or torch.get_num_threads(),
        "run": target.runner.name,
        "kernels": getattr(target.runner, "build", ""),
        **asdict(target.runner.weight_format),
        "draft_weights": target.draft_weights,
        "versions": versions(),
    }


class KeptFile:
    """A JSON file in the user's cache folder that holds a value, and the key that the value belongs to."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.key = path, key

    @classmethod
    def for_key(cls, kind: str, key: dict[str, Any]) -> Self:
        """Return the file of this kind for a key."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(user_cache() / f"{kind}-{name}.json", key)

    def load(self, name: str, parse: Callable[[dict[str, Any]], Value]) -> Value | None:
        """Return the value; None if the file is missing, damaged, or belongs to another key."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = parse_json(self.path.read_bytes())
            return parse(content[name]) if content["key"] == self.key else None
        return None

    def store(self, name: str, value: object) -> None:
        """Write the value. Where that is not possible, nothing is kept."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.path) as stream:
                stream.write((json.dumps({"key": self.key, name: value}) + "\n").encode())


def cost_path(key: dict[str, Any]) -> Path:
    """Return the file that keeps the costs of this key."""
    return KeptFile.for_key("tune", key).path


def load_costs(
    drafter: Drafter,
    force: bool = False,
    make: Callable[[Drafter], Costs] = measure,
    *,
    doubtful_seconds: float = DOUBTFUL_SECONDS,
    now: Callable[[], float] = time.time,
) -> tuple[Costs, bool]:
    """Return the costs, and whether they were read instead of measured.

    Args:
        force: measure them in any case.
        make: the function that measures.
        doubtful_seconds: how long a doubtful measurement is used; 0: it is always repeated, and a
            warning says so where the new one is doubtful too.
        now: seconds since the epoch.
    """
    file = KeptFile.for_key("tune", cost_key(drafter))
    kept = None if force else file.load("costs", Costs.from_json)
    if kept is not None and not kept.expired(now(), doubtful_seconds):
        return kept, True
    name, why = method_name(drafter), ""
    if kept is not None:
        why = " again: the machine was busy when they were measured before"
    log.info("measuring passes and drafts of %s, which takes some seconds%s (--tree fixed goes without)", name, why)
    costs = make(drafter)
    if costs.doubtful and doubtful_seconds <= 0:
        advice = "its trees may differ from a quiet machine's: repeat on one, or compare with --tree fixed"
        log.warning("the costs of %s are %s; %s", name, costs.quality, advice)
    file.store("costs", asdict(costs))
    return costs, False
