"""The stages of runs/gpu.py, in the order in which they are run.

A stage has cases; each is a function of a `Lab` and the record so far that returns a record with "rows" (a table) and
what else is worth keeping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _common import bundled_prompts
from _common import drafter as pretrained
from _gpu_lab import DENSE, EXPERTS, Entry, Lab, Plan, Timing, timed_cycles, with_fastest_runner
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

import eyas
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas_lab.bench import cost
from eyas_lab.bench.card import card
from eyas_lab.bench.simulate import simulated
from eyas_lab.metrics import first_difference

Record = dict[str, Any]
Stages = Mapping[str, Mapping[str, Record]]  # of a record: stage -> case -> what it measured
TREE = {"tree.nodes": 26, "tree.depth": 5, "tree.branch": 4}
TEXTS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("vanilla", {}, 0.0), ("eagle3", TREE, 0.0), ("vanilla", {}, 1.0), ("eagle3", TREE, 1.0), ("eagle1", {}, 0.0),
)  # fmt: skip
TRACED = 3  # cycles
LISTED = 24  # kernels


@dataclass(frozen=True)
class Case:
    """A piece of a stage.

    Attributes:
        seconds: that it takes on a GPU, by estimate; it is not begun when less time is left.
    """

    stage: str
    name: str
    run: Callable[[Lab, Stages], Record]
    seconds: float


# --- the machine and the texts -----------------------------------------------------------------------------------------------------------


def _machine(lab: Lab, before: Stages) -> Record:
    """Name, versions, and the two ceilings: bytes read and operations per second."""
    described = card(dtype=lab.plan.dtype, device=str(lab.device))
    bandwidth, flops = cost.bandwidth(lab.device), flop_rate(lab.target(lab.plan.shape, "off"))
    gpu = described["gpus"][0]["name"] if described["gpus"] else described["cpu"]
    row = {"device": gpu, "TB/s read": (bandwidth or 0) / 1e12, "TFLOP/s": (flops or 0) / 1e12, **described["versions"]}
    return {"rows": [row], "card": described, "bandwidth": bandwidth, "flops": flops}


def flop_rate(target: Target) -> float | None:
    """Floating-point operations per second of the target's device in its dtype: the best of some products of matrices;
    None where the device cannot multiply these."""
    device = target.device
    size = 8192 if device.type == "cuda" else 1024
    try:
        matrix = torch.empty(size, size, device=device, dtype=target.dtype).normal_(std=size**-0.5)
        return 2 * size**3 / min(cost.device_seconds(lambda: matrix @ matrix, device) for _ in range(cost.REPEATS))
    except RuntimeError:
        return None


def _texts(lab: Lab, before: Stages, dtype: str, kernels: str) -> Record:
    """The embedded model's texts by a runner, compared with plain decoding by the model's own forward in the same dtype.

    A text that differs is judged by the float32 logits after the common prefix: in float32 a margin above 1e-4 is a bug.
    """
    where = {"device": str(lab.device), "method": "vanilla", "kernels": "off"}
    llm = eyas.load(**where, dtype=dtype)
    exact = llm if dtype == "float32" else eyas.load(**where, dtype="float32")
    prompts = [llm.request(p.turns[0], raw=p.raw)[0].prompt for p in bundled_prompts(lab.plan.prompts)]
    rows, plain = list[Record](), dict[tuple[float, int], list[int]]()
    for runner in ("off", kernels):
        target = with_fastest_runner(Target(llm.target.model, "embedded"), runner)
        for method, tree, temperature in TEXTS if runner != "compile" else TEXTS[:2]:
            drafting = pretrained(target, method, tree)
            decoder, margins = Decoder(drafting.target, drafting), list[float]()
            for number, prompt in enumerate(prompts):
                sampling = Sampling(temperature, seed=number)
                text = _decoded(decoder, Request(prompt, lab.plan.new_tokens, sampling, llm.eos))
                true = plain.setdefault((temperature, number), text)
                if (at := first_difference(text, true)) is not None:
                    margins.append(_margin(exact.target, [*prompt, *true[:at]], text[at:], true[at:]))
            row = {"dtype": dtype, "kernels": runner, "method": method, "T": temperature, "texts": len(prompts)}
            rows.append({**row, "differ": len(margins), "largest margin": max(margins, default=None)})
    return {"rows": rows}


def _decoded(decoder: Decoder, request: Request) -> list[int]:
    decoder.add(request)
    text = list[int]()
    while not decoder.finished:
        for step in decoder.step():
            if step.error is not None:
                raise step.error
            text += step.tokens
    return text


def _margin(exact: Target, prefix: list[int], ours: Sequence[int], true: Sequence[int]) -> float:
    """The distance of both tokens' logits; infinite where one text ends."""
    if not ours or not true:
        return float("inf")
    logits_V = exact.open(1).prefill(0, prefix)
    return abs(float(logits_V[true[0]] - logits_V[ours[0]]))


# --- cycles ------------------------------------------------------------------------------------------------------------------------------


def _cycles(
    lab: Lab, before: Stages, entries: Sequence[Entry], context: int, rows: int = 1, shape: str = "",
    rates: Sequence[float] = DENSE, temperature: float = 0.0, ahead: bool = True,
) -> Record:  # fmt: skip
    """Cycles of the entries beside plain decoding by the same runner, which comes first."""
    shape = shape or lab.plan.shape
    plain = Entry(kernels=entries[0].kernels)
    drafters = {entry.name: lab.drafter(entry, shape) for entry in (plain, *entries)}
    timings = timed_cycles(lab, drafters, context, rows, rates, temperature, ahead)
    target: Target = drafters[plain.name].target
    run: Any = target.runner
    runner = f"{run.name}, layers by kernels" if getattr(run, "fused", None) else run.name
    about = {"shape": shape, "kernels": plain.kernels, "runner": runner}
    about |= {"context": context, "rows": rows, "T": temperature, "ahead": ahead}
    bandwidth = before.get("machine", {}).get("machine", {}).get("bandwidth")
    bound_ms = _bound_ms(bandwidth, target, context, rows) if bandwidth else None
    base = timings[plain.name]
    lines = [{**about, **_line(name, timing, base, rows, bound_ms)} for name, timing in timings.items()]
    memory = torch.cuda.max_memory_allocated(lab.device) if lab.device.type == "cuda" else 0
    return {"rows": lines, "rounds_ms": {name: timing.ms for name, timing in timings.items()}, "memory": memory}


def _line(name: str, timing: Timing, base: Timing, rows: int, bound_ms: float | None) -> Record:
    ratios = [ms / plain for ms, plain in zip(timing.ms, base.ms, strict=True)]
    c = [timing.cycle_ms / base.cycle_ms, min(ratios), max(ratios)]
    return {
        "method": name,
        "ms": [timing.cycle_ms, min(timing.ms), max(timing.ms)],
        "c": c,
        "tau": timing.tau,
        "R": timing.tau / c[0],
        "tokens/s": rows * 1e3 * timing.tau / timing.cycle_ms,
        "of the bound": bound_ms / timing.cycle_ms if bound_ms and timing is base else None,
    }


def _bound_ms(bandwidth: float, target: Target, context: int, rows: int) -> float:
    """Milliseconds in which the machine reads a plain step's weights, and its rows' keys and values."""
    stored = sum(heads * sum(widths) for heads, *widths in filter(None, target.layout)) * target.dtype.itemsize
    return 1e3 * (cost.bytes_per_step(target) + rows * context * stored) / bandwidth


def _profile(lab: Lab, before: Stages, entry: Entry) -> Record:
    """The kernels of recorded cycles by their names: how often, how long."""
    drafter = lab.drafter(entry)
    decoder = Decoder(drafter.target, drafter, verify=simulated((0.8, 0.7)))
    dice = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, drafter.target.vocab_size, (lab.plan.contexts[0],), generator=dice).tolist()
    decoder.add(Request(tuple(prompt), 12 * (TRACED + lab.plan.warm + 2)))
    for _ in range(1 + lab.plan.warm):
        decoder.step()
    on_gpu = lab.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(TRACED):
            decoder.step()
        lab.wait()
    count, micros = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        # what the host called; its kernels have entries of their own
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if time_us:
            count[event.key], micros[event.key] = event.count, time_us
    listed = [
        {"kernel": name[:90], "a cycle": count[name] / TRACED, "us a cycle": us / TRACED}
        for name, us in micros.most_common(LISTED)
    ]
    whole = {"kernel": "all", "a cycle": sum(count.values()) / TRACED, "us a cycle": sum(micros.values()) / TRACED}
    return {"rows": [whole, *listed], "kernels": dict(count), "us": dict(micros)}


# --- all stages --------------------------------------------------------------------------------------------------------------------------


def cases(plan: Plan) -> list[Case]:
    """The cases of all stages, in the order of their worth."""
    return [Case(stage, name, run, seconds) for stage, name, run, seconds in _cases(plan)]


def _cases(plan: Plan) -> Iterator[tuple[str, str, Callable[[Lab, Stages], Record], float]]:
    tree, fewer, small = (Entry("eagle3", shape) for shape in plan.trees)
    short = plan.contexts[0]
    fp8 = replace(tree, draft_weights="fp8")

    def cycles(*entries: Entry, context: int = short, **more: Any) -> Callable[[Lab, Stages], Record]:
        return partial(_cycles, entries=entries, context=context, **more)

    yield "machine", "machine", _machine, 30
    for dtype in ("float32", "bfloat16"):
        yield "texts", dtype, partial(_texts, dtype=dtype, kernels="on"), 60
    for context in plan.contexts:
        yield "first", f"{context} tokens", cycles(tree, context=context), 30
    yield "first", "one cycle after the other", cycles(tree, ahead=False), 30
    yield "first", "without graphs", cycles(replace(tree, kernels="off")), 40
    for entry in (Entry(), tree):
        yield "profile", entry.name, partial(_profile, entry=entry), 20
    yield "compile", "texts, float32", partial(_texts, dtype="float32", kernels="compile"), 90
    for context in plan.contexts:
        yield "compile", f"{context} tokens", cycles(replace(tree, kernels="compile"), context=context), 120
    yield "fp8", f"{short} tokens", cycles(fp8, replace(fewer, draft_weights="fp8")), 40
    yield "sampled", "bf16", cycles(tree, temperature=1.0), 30
    yield "sampled", "fp8", cycles(fp8, temperature=1.0), 30
    for rows in plan.rows:
        yield "rows", f"{rows} rows", cycles(tree, small, rows=rows), 30 + 3 * rows
    yield "trees", "trees", cycles(fewer, small), 60
    for shape in plan.others:
        rates = EXPERTS if "mixtral" in shape else DENSE
        yield shape, f"{short} tokens", cycles(tree, small, shape=shape, rates=rates), 90
