"""The tools of runs/gpu.py: models made on the device, and decoders whose cycles are timed. They know no stage."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from _common import tree_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from eyas import runners
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas_gpu.compiled import CompiledLayers
from eyas_gpu.graphs import GraphRunner, tensors_of
from eyas_gpu.recording import CycleReplay
from eyas_lab.bench.simulate import simulated

T = TypeVar("T")
DENSE = (0.79, 0.74, 0.72, 0.73, 0.67)  # n-alpha of EAGLE-1 for Vicuna 7B (E1, table 1)
EXPERTS = (0.67, 0.62, 0.61, 0.64, 0.63)  # for Mixtral 8x7B (E1, table 3)
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 65_536, "tie_word_embeddings": False}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 2}
HEADS = ("num_attention_heads", "num_key_value_heads")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", *HEADS, "vocab_size")
SHAPES: dict[str, dict[str, Any]] = {
    "small": {**LLAMA, **dict(zip(SIZES, (256, 704, 8, 4, 2, 4096), strict=True))},
    "mixtral-tiny": {**MIXTRAL, **dict(zip(SIZES, (128, 256, 8, 4, 2, 1024), strict=True)), "num_local_experts": 4},
    "llama-7b": {**LLAMA, **dict(zip(SIZES, (4096, 11008, 32, 32, 32, 32000), strict=True))},
    "llama-8b": {**LLAMA, **dict(zip(SIZES, (4096, 14336, 32, 32, 8, 128256), strict=True))},
    "mixtral-8x7b": {**MIXTRAL, **dict(zip(SIZES, (4096, 14336, 32, 32, 8, 32000), strict=True)), "num_local_experts": 8},
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Sizes of what is measured."""

    shape: str = "llama-8b"
    others: tuple[str, ...] = ("llama-7b", "mixtral-8x7b")
    contexts: tuple[int, ...] = (1024, 8192, 16_384)
    rows: tuple[int, ...] = (1, 4, 16)
    # nodes/levels/branch; the first one unless something else is said
    trees: tuple[str, ...] = ("60/8/10", "60/6/10", "32/6/8")
    rounds: int = 5
    cycles: int = 16  # of a round
    warm: int = 4  # cycles before the first round; graphs are recorded in them
    prompts: int = 12  # of the embedded model
    new_tokens: int = 64
    dtype: str = "bfloat16"


FULL = Plan()
SMALL = Plan(
    shape="small", others=("mixtral-tiny",), contexts=(64,), rows=(2,), trees=("8/3/4", "8/2/4", "5/2/2"),
    rounds=1, cycles=2, warm=2, prompts=1, new_tokens=6,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A contestant: a method with its tree, on a runner."""

    method: str = "vanilla"
    tree: str = ""  # nodes/levels/branch; "" for methods without one
    kernels: str = "on"
    draft_weights: str = "auto"

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.method, self.tree, "fp8" if self.draft_weights == "fp8" else ""]))


class Lab:
    """The device, and the one model on it, which all runners share.

    On a CPU "on" and "compile" go the way of a GPU: recorded cycles are run again instead of replayed, and layers are
    compiled by a backend that changes nothing.
    """

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self.device, self.plan = device, plan
        self._shape, self._model = "", None
        self._targets: dict[str, Target] = {}

    def model(self, shape: str) -> PreTrainedModel:
        """A model of this shape with random weights; the one before it is freed."""
        if shape != self._shape:
            self._shape, self._model = "", None
            self._targets.clear()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            with self.device:
                config = AutoConfig.for_model(**SHAPES[shape])
                self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.plan.dtype)).eval()
            self._shape = shape
        assert self._model is not None
        return self._model

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def target(self, shape: str, kernels: str, draft_weights: str = "auto") -> Target:
        """The model with this runner."""
        model = self.model(shape)
        if kernels not in self._targets:
            self._targets[kernels] = with_fastest_runner(Target(model, shape), kernels)
        target = copy(self._targets[kernels])
        target.draft_weights = draft_weights
        return target

    def drafter(self, entry: Entry, shape: str = "") -> Drafter:
        """The method, with random weights."""
        kind = find(entry.method)
        target = self.target(shape or self.plan.shape, entry.kernels, entry.draft_weights)
        return kind.random(target, build_options(kind.Options, tree_of(entry.tree) if entry.tree else {}))


def with_fastest_runner(target: Target, kernels: str) -> Target:
    """The target with a runner: "off", "on" or "compile", as `--kernels`."""
    if target.device.type == "cuda":
        return runners.with_fastest_runner(target, kernels)
    if kernels == "off":
        return target
    layers = CompiledLayers(target.family.layers, "eager") if kernels == "compile" else None
    return target.run_with(GraphRunner(target, again, layers))


def again(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
    """A capture for a CPU: a replay runs the work again, and copies its results to the places of the first ones."""
    result = work()
    undo()

    def replay() -> None:
        for first, new in zip(tensors_of(result), tensors_of(work()), strict=True):
            if first.data_ptr() != new.data_ptr():
                first.copy_(new)

    return result, replay


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
    """Time rounds of cycles of all drafters in turn, each with `rows` texts after prompts of `context` random tokens.

    A round begins and ends on an idle device, so the host's work counts, and so does the cycle that ran ahead.

    Args:
        ahead: whether a cycle is launched before the last one is read.
    """
    plan, generator = lab.plan, torch.Generator().manual_seed(context)
    decoders, timings = dict[str, Decoder](), {name: Timing() for name in drafters}
    for name, drafter in drafters.items():
        decoder = Decoder(drafter.target, drafter, rows, verify=simulated(rates))
        if isinstance(decoder.cycle_runner, CycleReplay):
            decoder.cycle_runner.runs_ahead = ahead
        longest = 12 * (plan.warm + plan.rounds * plan.cycles + rows)
        for row in range(rows):
            prompt = torch.randint(3, drafter.target.vocab_size, (context,), generator=generator).tolist()
            decoder.add(Request(tuple(prompt), longest, Sampling(temperature, seed=row)))
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
