"""The tools of runs/gpu.py: models made on the device, decoders whose cycles are timed, a file of
results, a limit of time.

    Plan        sizes of everything that is measured: FULL for a GPU, SMALL for trying all of it on a CPU
    Lab         the device, and the one model that lies on it, with its runners and drafters
    Results     a JSON file that is written whole after every case: nothing that was measured is lost
    Clock       the time that is left

This module knows no stage.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import _markdown
import torch
from _common import tree_of
from random_target import SHAPES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eyas import runners
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.files import write_text
from eyas.runners.compiled import CompiledLayers
from eyas.runners.graphs import GraphRunner, tensors_of
from eyas.runners.recording import CycleReplay
from eyas_lab.bench.simulate import simulated

T = TypeVar("T")
POSITIONS = 65_536  # of every shape: contexts of 32k and their answers fit
DENSE = (0.79, 0.74, 0.72, 0.73, 0.67)  # n-alpha of EAGLE-1 for Vicuna 7B (E1, table 1)
EXPERTS = (0.67, 0.62, 0.61, 0.64, 0.63)  # for Mixtral 8x7B (E1, table 3)


@dataclass(frozen=True)
class Plan:
    """Sizes of what is measured."""

    shape: str = "llama-8b"
    others: tuple[str, ...] = ("llama-7b", "mixtral-8x7b")
    contexts: tuple[int, ...] = (1024, 8192)
    long: int = 16_384
    window: tuple[int, int, int] = (2048, 2048, 32_768)  # SEAGLE: size, short context, long context
    rows: tuple[int, ...] = (1, 4, 16)
    # nodes/levels/branch; the first one unless something else is said
    trees: tuple[str, ...] = ("60/8/10", "60/6/10", "32/6/8")
    rounds: int = 5
    cycles: int = 16  # of a round
    warm: int = 4  # cycles before the first round; graphs are recorded in them
    prompts: int = 12  # of the embedded model
    new_tokens: int = 64
    reference_tokens: tuple[int, int] = (32, 160)  # of transformers' generate: the difference is timed
    repeats: int = 50  # of small pieces of work
    dtype: str = "bfloat16"


FULL = Plan()
SMALL = Plan(
    shape="small", others=("mixtral-tiny",), contexts=(64, 192), long=320, window=(64, 128, 512), rows=(1, 2),
    trees=("8/3/4", "8/2/4", "5/2/2"), rounds=2, cycles=2, warm=2, prompts=1, new_tokens=6, reference_tokens=(2, 6), repeats=2,
)  # fmt: skip


class OutOfTime(Exception):  # noqa: N818 - it is no error
    """The time is over; what is left is measured by the next run."""


class Clock:
    """The time that is left of a run.

    Args:
        minutes: of the whole run, its start included.
        began: when it began, seconds since the epoch.
    """

    def __init__(self, minutes: float, began: float) -> None:
        self.end = began + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.time()

    def require(self, seconds: float) -> None:
        """OutOfTime unless so many seconds are left."""
        if self.left < seconds:
            raise OutOfTime


class Results:
    """The records of all cases, by stage and case, in one JSON file that is replaced as a whole
    whenever a case is added."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "stages": {}}
        )
        self.content["runs"].append(dict(about))

    def has(self, stage: str, case: str) -> bool:
        return case in self.content["stages"].get(stage, {})

    def get(self, stage: str, case: str) -> dict[str, Any]:
        record: dict[str, Any] = self.content["stages"].get(stage, {}).get(case, {})
        return record

    def add(self, stage: str, case: str, record: Mapping[str, Any]) -> None:
        """Write a record, with the number of the run (in `runs`) that made it."""
        self.content["stages"].setdefault(stage, {})[case] = {**record, "run": len(self.content["runs"]) - 1}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")

    def forget_failures(self) -> None:
        """Have failed cases measured again."""
        for cases in self.content["stages"].values():
            for case in [case for case, record in cases.items() if "error" in record]:
                del cases[case]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown; the columns are all keys in the order in which they come."""
    heads = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        if isinstance(value, list | tuple):
            return f"{cell(value[0])} [{', '.join(map(cell, value[1:]))}]"
        return "" if value is None else str(value)

    return _markdown.table(heads, ([cell(row.get(name)) for name in heads] for row in rows))


# --- the device, its model, its drafters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A contestant: a method with its tree, on a runner."""

    method: str = "vanilla"
    tree: str = ""  # nodes/levels/branch; "" for methods without one
    kernels: str = "on"
    draft_weights: str = "exact"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        parts = [self.method, self.tree, *(f"{key} {value}" for key, value in self.options)]
        return " ".join(filter(None, [*parts, "fp8" if self.draft_weights == "fp8" else ""]))


class Lab:
    """The device, and the one model that lies on it; it is made once, on the device, and shared by
    all runners.

    On a CPU "on" and "compile" take the way of a GPU as far as it goes: recorded cycles are run
    again instead of replayed, and compiled layers are compiled by a backend that changes nothing.
    """

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self.device, self.plan = device, plan
        self._shape, self._model = "", None
        self._targets: dict[str, Target] = {}

    def model(self, shape: str) -> PreTrainedModel:
        """A model of this shape with random weights; the one before it is freed."""
        if shape != self._shape:
            self.clear()
            config = AutoConfig.for_model(**{**SHAPES[shape], "max_position_embeddings": POSITIONS})
            torch.manual_seed(0)
            with self.device:
                self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.plan.dtype)).eval()
            self._shape = shape
        assert self._model is not None
        return self._model

    def clear(self) -> None:
        """Free the model and all that hangs on it."""
        self._shape, self._model = "", None
        self._targets.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def target(self, shape: str, kernels: str, draft_weights: str = "exact") -> Target:
        """The model with this runner."""
        model = self.model(shape)
        if kernels not in self._targets:
            self._targets[kernels] = with_fastest_runner(Target(model, shape), kernels)
        target = copy(self._targets[kernels])
        target.draft_weights = draft_weights
        return target

    def drafter(self, entry: Entry, shape: str = "") -> Drafter:
        """The method, with random weights."""
        kind, options = find(entry.method), dict(entry.options)
        options |= tree_of(entry.tree) if entry.tree else {}
        target = self.target(shape or self.plan.shape, entry.kernels, entry.draft_weights)
        return kind.random(target, build_options(kind.Options, options))


def with_fastest_runner(target: Target, kernels: str) -> Target:
    """The target with a runner: "off", "on" or "compile", as `--kernels`."""
    if target.device.type == "cuda":
        return runners.with_fastest_runner(target, kernels)
    if kernels == "off":
        return target
    layers = CompiledLayers(target.family.layers, "eager") if kernels == "compile" else None
    return target.run_with(GraphRunner(target, again, layers))


def again(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
    """A capture for a CPU: a replay runs the work again, and copies its results to where the first
    run's are."""
    result = work()
    undo()

    def replay() -> None:
        for first, new in zip(tensors_of(result), tensors_of(work()), strict=True):
            if first.data_ptr() != new.data_ptr():
                first.copy_(new)

    return result, replay


# --- timing ------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """Rounds of one decoder's cycles."""

    ms: list[float] = field(default_factory=list)  # of a cycle, the mean of each round
    tokens: int = 0
    row_cycles: int = 0

    @property
    def cycle_ms(self) -> float:
        return median(self.ms)

    @property
    def tau(self) -> float:
        return self.tokens / self.row_cycles


def timed_cycles(
    lab: Lab, drafters: Mapping[str, Drafter], context: int, rows: int, rates: Sequence[float] = DENSE, temperature: float = 0.0,
    ahead: bool = True,
) -> dict[str, Timing]:  # fmt: skip
    """Time rounds of cycles of all drafters by turns. Each decodes `rows` texts behind prompts of
    `context` random tokens.

    A round begins and ends on an idle device, so whatever the host does in between counts, and so
    does the cycle that ran ahead.

    Args:
        ahead: whether a cycle is launched before the last one is read.
    """
    plan, generator = lab.plan, torch.Generator().manual_seed(context)
    count = plan.warm + plan.rounds * plan.cycles
    decoders, timings = dict[str, Decoder](), {name: Timing() for name in drafters}
    for name, drafter in drafters.items():
        decoder = Decoder(drafter.target, drafter, rows, verify=simulated(rates))
        if isinstance(decoder.cycle_runner, CycleReplay):
            decoder.cycle_runner.runs_ahead = ahead
        for row in range(rows):
            prompt = torch.randint(3, drafter.target.vocab_size, (context,), generator=generator).tolist()
            decoder.add(Request(tuple(prompt), 12 * (count + rows), Sampling(temperature, seed=row)))
        while not all(decoder.rows):
            decoder.step()
        for _ in range(plan.warm):
            decoder.step()
        decoders[name] = decoder
    for _ in range(plan.rounds):
        for name, decoder in decoders.items():
            lab.wait()
            began = time.perf_counter()
            for _ in range(plan.cycles):
                steps = decoder.step()
                timings[name].tokens += sum(len(step.path) for step in steps)
                timings[name].row_cycles += len(steps)
            lab.wait()
            timings[name].ms.append(1e3 * (time.perf_counter() - began) / plan.cycles)
    return timings


def elapsed_ms(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """[median, lower quartile, upper quartile] of the milliseconds that work takes: on a GPU
    between events, else by the clock."""
    for _ in range(3):
        work()
    times = list[float]()
    if device.type == "cuda":
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize(device)
        times = [begin.elapsed_time(end) for begin, end in events]
    else:
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    ordered = torch.tensor(times, dtype=torch.float64)
    return [float(ordered.quantile(q)) for q in (0.5, 0.25, 0.75)]


def random_like(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers: what is timed on zeros or ones can be faster."""
    return torch.empty(shape, device=device, dtype=dtype).normal_()
