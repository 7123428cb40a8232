"""The stages of runs/gpu.py, in the order in which they are run: what is needed first comes first.

A stage has cases; each is a function of a `Bench` that returns a record with "rows" (a table) and
whatever else is worth keeping. Cases are run one by one and written at once, so a stage may end in
one run and go on in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _common import bundled_prompts
from _common import drafter as pretrained
from _gpu_lab import DENSE, EXPERTS, Entry, Lab, Plan, Results, Timing, timed_cycles, with_fastest_runner
from _gpu_pieces import attention_rows, draft_ms, kernel_rows, reference_rows

import eyas
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.metrics import first_difference
from eyas_lab.bench import cost
from eyas_lab.bench.card import card

Record = dict[str, Any]
TREE = {"tree.nodes": 26, "tree.depth": 5, "tree.branch": 4}
TEXTS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("vanilla", {}, 0.0), ("eagle3", TREE, 0.0), ("vanilla", {}, 1.0), ("eagle3", TREE, 1.0), ("eagle1", {}, 0.0),
)  # fmt: skip


@dataclass
class Bench:
    """The models and settings of a case."""

    lab: Lab
    results: Results

    @property
    def plan(self) -> Plan:
        return self.lab.plan


@dataclass(frozen=True)
class Case:
    """A piece of a stage.

    Attributes:
        seconds: that it takes on a GPU, by estimate; it is not begun when less time is left.
    """

    name: str
    run: Callable[[Bench], Record]
    seconds: float


@dataclass(frozen=True)
class Stage:
    """Cases that are measured together."""

    name: str
    about: str
    cases: Sequence[Case]


# --- the machine and the texts -----------------------------------------------------------------------------------------------------------


def _machine(bench: Bench) -> Record:
    """Name, versions, and the two ceilings: bytes read and operations per second."""
    device, plan = bench.lab.device, bench.plan
    described = card(dtype=plan.dtype, device=str(device))
    bandwidth, flops = cost.bandwidth(device), cost.flop_rate(bench.lab.target(plan.shape, "off"))
    gpu = described["gpus"][0]["name"] if described["gpus"] else described["cpu"]
    row = {"device": gpu, "TB/s read": (bandwidth or 0) / 1e12, "TFLOP/s": (flops or 0) / 1e12, **described["versions"]}
    return {"rows": [row], "card": described, "bandwidth": bandwidth, "flops": flops}


def _texts(bench: Bench, dtype: str, kernels: Sequence[str]) -> Record:
    """The embedded model's texts by all runners, against plain decoding by the model's own forward
    in the same dtype.

    A text that differs is judged by the float32 logits behind the common prefix: in float32 a
    margin above 1e-4 is a bug.
    """
    where = {"device": str(bench.lab.device), "method": "vanilla", "kernels": "off"}
    llm = eyas.load(**where, dtype=dtype)
    exact = llm if dtype == "float32" else eyas.load(**where, dtype="float32")
    prompts = [llm.request(p.turns[0], raw=p.raw)[0].prompt for p in bundled_prompts(bench.plan.prompts)]
    rows, plain = list[Record](), dict[tuple[float, int], list[int]]()
    for runner in ("off", *kernels):
        target = with_fastest_runner(Target(llm.target.model, "embedded"), runner)
        for method, tree, temperature in TEXTS if runner != "compile" else TEXTS[:2]:
            drafting = pretrained(target, method, tree)
            decoder, margins = Decoder(drafting.target, drafting), list[float]()
            for number, prompt in enumerate(prompts):
                sampling = Sampling(temperature, seed=number)
                text = _decoded(decoder, Request(prompt, bench.plan.new_tokens, sampling, llm.eos))
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
    """How much the logit of plain decoding's token is larger than that of ours; infinite where one
    text ends."""
    if not ours or not true:
        return float("inf")
    logits_V = exact.open(1).prefill(0, prefix)
    return abs(float(logits_V[true[0]] - logits_V[ours[0]]))


# --- cycles ------------------------------------------------------------------------------------------------------------------------------


def _cycles(
    bench: Bench,
    entries: Sequence[Entry],
    context: int,
    rows: int = 1,
    shape: str = "",
    rates: Sequence[float] = DENSE,
    temperature: float = 0.0,
    ahead: bool = True,
) -> Record:
    """Cycles of the entries beside plain decoding by the same runner, which comes first."""
    shape = shape or bench.plan.shape
    plain = Entry(kernels=entries[0].kernels)
    entered = {entry.name: entry for entry in (plain, *entries)}
    drafters = {name: bench.lab.drafter(entry, shape) for name, entry in entered.items()}
    timings = timed_cycles(bench.lab, drafters, context, rows, rates, temperature, ahead)
    base = timings[plain.name]
    run: Any = drafters[plain.name].target.runner
    runner = f"{run.name}, layers by kernels" if getattr(run, "fused", None) else run.name
    about = {"shape": shape, "kernels": plain.kernels, "runner": runner}
    about |= {"context": context, "rows": rows, "T": temperature, "ahead": ahead}
    target = drafters[plain.name].target
    bound_ms = _bound_ms(bench, target, context, rows)
    lines = [{**about, **_line(name, timing, base, rows, bound_ms)} for name, timing in timings.items()]
    return {"rows": lines, "rounds_ms": {name: timing.ms for name, timing in timings.items()}, "memory": _memory(bench)}


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


def _bound_ms(bench: Bench, target: Target, context: int, rows: int) -> float | None:
    """Milliseconds in which the machine reads a plain step's weights, and its rows' keys and values."""
    bandwidth = bench.results.get("machine", "machine").get("bandwidth")
    if not bandwidth:
        return None
    one, empty = cost.need(target, 1, context).bytes, cost.need(target, 1, 0).bytes
    return 1e3 * (empty + rows * (one - empty)) / float(bandwidth)


def _memory(bench: Bench) -> int:
    return torch.cuda.max_memory_allocated(bench.lab.device) if bench.lab.device.type == "cuda" else 0


def _attention(bench: Bench, context: int) -> Record:
    """Attention of one layer, by torch and by eyas' kernel."""
    return attention_rows(bench.lab, context)


def _reference(bench: Bench, how: str) -> Record:
    """The same model by transformers' generate."""
    return reference_rows(bench.lab, how, bench.plan.contexts[0])


def _profile(bench: Bench, entry: Entry) -> Record:
    """Which kernels a cycle consists of, and how long the device is busy with them."""
    return kernel_rows(bench.lab, entry, bench.plan.contexts[0])


def _draft(bench: Bench, method: str, options: tuple[tuple[str, Any], ...]) -> Record:
    """A draft alone, recorded, at a short and at a long context."""
    (_, short, long), entry = bench.plan.window, Entry(method, bench.plan.trees[0], options=options)
    drafts = {context: draft_ms(bench.lab, entry, context) for context in (short, long)}
    base = drafts[short][0]
    rows = [
        {"method": entry.name, "context": n, "draft ms": ms, "over short": ms[0] / base} for n, ms in drafts.items()
    ]
    return {"rows": rows}


# --- all stages --------------------------------------------------------------------------------------------------------------------------


def stages(plan: Plan) -> list[Stage]:
    """All stages, in the order of their worth."""
    tree, fewer, small = (Entry("eagle3", shape) for shape in plan.trees)
    short, size = plan.contexts[0], plan.window[0]
    window = (("window.size", size),)

    def cycles(name: str, entries: Sequence[Entry], context: int, seconds: float, **more: Any) -> Case:
        return Case(name, partial(_cycles, entries=entries, context=context, **more), seconds)

    def by(kernels: str, *entries: Entry, draft_weights: str = "exact") -> list[Entry]:
        return [Entry(e.method, e.tree, kernels, draft_weights, e.options) for e in entries]

    compiled = [
        Case("texts, float32", partial(_texts, dtype="float32", kernels=("compile",)), 90),
        *(cycles(f"{context} tokens", by("compile", tree), context, 120) for context in plan.contexts),
    ]
    return [
        Stage("machine", "the machine and its ceilings", [Case("machine", _machine, 30)]),
        Stage("texts", "the embedded model: the same ids by every runner", [
            Case("float32", partial(_texts, dtype="float32", kernels=("on",)), 60),
            Case("bfloat16", partial(_texts, dtype="bfloat16", kernels=("on",)), 60),
        ]),
        Stage("first", "plain decoding and EAGLE-3, recorded", [
            *(cycles(f"{context} tokens", [tree], context, 30) for context in plan.contexts),
            cycles("one cycle after the other", [tree], short, 30, ahead=False),
            cycles("without graphs", by("off", tree), short, 40),
        ]),
        Stage("attention", "attention alone, one layer", [
            Case(f"{n} tokens", partial(_attention, context=n), 20) for n in (*plan.contexts, plan.long)
        ]),
        Stage("profile", "kernels of a cycle", [Case(e.name, partial(_profile, entry=e), 20) for e in (Entry(), tree)]),
        Stage("compile", "layers by torch.compile", compiled),
        Stage("long", "a long context", [cycles(f"{plan.long} tokens", [tree], plan.long, 40)]),
        Stage("fp8", "drafts in fp8", [cycles(f"{short} tokens", by("on", tree, fewer, draft_weights="fp8"), short, 40)]),
        Stage("sampled", "T = 1", [
            cycles("bf16", [tree], short, 30, temperature=1.0),
            cycles("fp8", by("on", tree, draft_weights="fp8"), short, 30, temperature=1.0),
        ]),
        Stage("seagle", "a draft's time against the context", [
            Case("seagle", partial(_draft, method="seagle", options=window), 40),
            Case("eagle3", partial(_draft, method="eagle3", options=()), 40),
        ]),
        Stage("rows", "several rows", [cycles(f"{rows} rows", [tree, small], short, 30 + 3 * rows, rows=rows) for rows in plan.rows]),
        Stage("trees", "other trees and methods", [
            cycles("trees", [fewer, small, Entry("eagle1", options=(("tree.choices", "chain-5"),))], short, 60),
        ]),
        Stage("transformers", "transformers' generate with the same model", [
            Case(how, partial(_reference, how=how), 120) for how in ("dynamic", "static", "static, compiled")
        ]),
        *(Stage(shape, "another model", [
            cycles(f"{short} tokens", [tree, small], short, 90, shape=shape, rates=EXPERTS if "mixtral" in shape else DENSE)
        ]) for shape in plan.others),
    ]  # fmt: skip
