"""Tokens per second on this machine, interleaved prompt by prompt, and what passes cost.

    python runs/speed.py --output docs/results/speed.json                                     the embedded model        (make bench)
    python runs/speed.py --target MODEL --draft eagle3=HEAD --output FILE.json                another, with its head
    python runs/speed.py --parts cost --output FILE.json                                      only the cost curves

Greedy or at --temperature, the bundled prompts of one turn, whole answers. Contestants:
transformers' generate; plain decoding by the model's own forward, and by the kernels (what every
ratio is over); trees of several sizes; trees by `auto`; and `auto` with a head of random weights.
`eyas_lab.bench` asks all of them prompt by prompt, another one first each time, so that drift of the
machine hits all alike; texts are compared. Intervals: 95 %, bootstrap over prompts. Cost curves: a
pass against its nodes, by the model's own forward and by the kernels, with weights kept as int8,
bfloat16 and float32, and rounded ones; and passes against the context.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import RESAMPLES, bundled_prompts, drafter, machine, parser, progress, rounded, run, tree, write
from _markdown import blocks
from _records import GENERATE, OWN, PLAIN
from results import cost_tables, speed_table
from transformers import AutoModelForCausalLM

import eyas
from eyas import kernels, runners
from eyas.adaptive import make_controller
from eyas.api import LLM
from eyas.core.target import Target
from eyas.core.totals import tau
from eyas.drafters import Drafter, find
from eyas.passes import verify_cost
from eyas_lab.bench.contestants import Contestant, Drafting, Transformers
from eyas_lab.bench.intervals import relative_cycle_cost
from eyas_lab.bench.record import Answer
from eyas_lab.bench.rows import speedup
from eyas_lab.bench.run import Bench

TREES = ((4, 3, 1), (5, 4, 1), (6, 3, 2), (8, 4, 2), (12, 5, 3), (26, 5, 4))
CONTEXTS = (256, 1024, 2048, 4000)


def contestants(base: LLM, heads: dict[str, str | None], greedy: bool) -> list[Contestant]:
    """Plain decoding in both ways, each method's trees, fixed and auto, and transformers' generate."""
    target = base.target
    entered: list[Contestant] = [
        Drafting("vanilla", base.drafter),
        Drafting(OWN, find("vanilla").load(None, Target(target.model, target.name))),
    ]
    for method, head in heads.items():
        for shape in TREES:
            entered.append(
                Drafting(f"{method} {'/'.join(map(str, shape))}", drafter(target, method, tree(*shape), head))
            )
        entered.append(by_auto(f"{method} auto", drafter(target, method, {}, head)))
    entered.append(by_auto("random head, auto", find(next(iter(heads))).random(target)))
    return [*entered, *([Transformers(target, GENERATE)] if greedy else [])]


def by_auto(name: str, drafting: Drafter) -> Contestant:
    """A drafter with trees by `auto`."""
    return Drafting(name, drafting, policy=make_controller(drafting))


def speeds(args: Any, base: LLM, heads: dict[str, str | None]) -> dict[str, Any]:
    """The table, and every prompt's tokens and seconds."""
    prompts = bundled_prompts(args.limit)
    asked = [replace(p, id=f"{p.id}#{turn}") for turn in range(args.rounds) for p in prompts]
    entered = contestants(base, heads, greedy=args.temperature == 0)
    bench = Bench(base, entered, asked, (args.temperature,), args.max_new_tokens, {"seed": 7})
    with tempfile.TemporaryDirectory() as folder, progress() as on_prompt:
        answers = bench.run(Path(folder), on_prompt)
    by_name: dict[str, list[Answer]] = {}
    for name in (contestant.name for contestant in entered):
        ours = [a.replace(prompt=a.prompt.partition("#")[0]) for a in answers if a.method == name]
        by_name[PLAIN if name == "vanilla" else name] = ours
    table = {name: entry(ours, by_name[PLAIN], by_name.get(GENERATE)) for name, ours in by_name.items()}
    return {"prompts": len(prompts), "table": table, "rows": rows(by_name)}


def entry(ours: Sequence[Answer], plain: Sequence[Answer], generate: Sequence[Answer] | None) -> dict[str, Any]:
    """A line of the table."""

    def over(base: Sequence[Answer]) -> list[float | None]:
        return rounded(speedup(ours, base, whole=True, resamples=RESAMPLES), 3)

    cycles, plain_cycles = (sum(len(a.cycles) for a in side) for side in (ours, plain))
    seconds, plain_seconds = (sum(a.decode_seconds for a in side) for side in (ours, plain))
    line: dict[str, Any] = {
        "tokens_per_second": round(sum(len(a.token_ids) for a in ours) / sum(a.seconds for a in ours), 1),
        "over_plain": over(plain),
        "equal": f"{sum(a.token_ids == b.token_ids for a, b in zip(ours, plain, strict=True))} of {len(ours)}",
    }
    if generate is not None:
        line["over_transformers"] = over(generate)
    if ours is not generate:
        line["tau"] = round(tau(sum(a.emitted for a in ours), cycles), 2)
        line["c"] = round(relative_cycle_cost(seconds, cycles, plain_seconds, plain_cycles) or 0.0, 2)
    return line


def rows(by_name: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """One entry per contestant, prompt and round."""
    out = []
    for number, plain in enumerate(by_name[PLAIN]):
        row: dict[str, Any] = {"prompt": plain.prompt}
        for name, answers in by_name.items():
            a = answers[number]
            counts = {"tokens": len(a.token_ids), "seconds": a.seconds, "cycles": len(a.cycles), "emitted": a.emitted}
            row[name] = {**counts, "decode": a.decode_seconds, "equal": a.token_ids == plain.token_ids}
        out.append(row)
    return out


def costs(base: LLM) -> dict[str, Any]:
    """Milliseconds of passes: own forward and kernels, by nodes; the kernels' by format of the
    weights, and by context."""
    target = base.target
    curves: dict[str, Any] = {
        "own forward, by nodes": verify_cost(Target(target.model, target.name)),
        "kernels, by nodes": verify_cost(target),
    }
    for form in ("float32", "bfloat16"):
        with torch.no_grad():
            other = AutoModelForCausalLM.from_config(target.model.config).eval()
            for weight in other.parameters():
                weight.copy_(weight.to(getattr(torch, form)).float())
        curves[f"kernels, {form} weights (random), by nodes"] = verify_cost(runners.with_fastest_runner(Target(other)))
    exact = target.runner.name == "kernels" and target.runner.weight_format.exact
    forms = [("bfloat16", "bfloat16")] if exact and kernels.has_avx512_bf16() else []
    forms += [("int8", "int16"), ("int8", "int8"), ("int4", "int8")] if exact and kernels.has_dots() else []
    for weights, activations in forms:
        less_exact = runners.with_fastest_runner(Target(target.model), weights=weights, activations=activations)
        curves[f"kernels, rounded: {weights} weights, {activations} activations, by nodes"] = verify_cost(less_exact)
    contexts = [c for c in CONTEXTS if c < target.context - 64]
    for nodes, label in ((1, "one node"), (8, "8 nodes")):
        curve = [{"context": c, "ms": verify_cost(target, c, (nodes,))[0]["ms"]} for c in contexts]
        curves[f"kernels, {label}, by context"] = curve
    return curves


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(
        __doc__,
        output=None,
        target=(None, "else the embedded model"),
        methods=("eagle3,eagle2", "of the embedded model"),
        parts="speed,cost",
        weights=("exact", "bfloat16, int8, int4: the target's, rounded: a target of its own"),
        activations=("exact", "bfloat16, int16, int8: likewise"),
        rounds=1,
        temperature=0.0,
        max_new_tokens=96,
    )
    about = "default: the embedded model's heads of --methods"
    made.add_argument("--draft", action="append", default=[], metavar="METHOD=HEAD", help=about)
    made.add_argument("--limit", type=int, help="prompts")
    made.add_argument("--output", type=Path)
    made.add_argument("--table", type=Path, metavar="FILE.json", help="only show an earlier record, as Markdown")
    args = made.parse_args(arguments)
    if args.table:
        show(json.loads(args.table.read_text()))
        return
    transformers.utils.logging.set_verbosity_error()
    before = machine()
    base = eyas.load(args.target, method="vanilla", weights=args.weights, activations=args.activations)
    target = base.target
    record: dict[str, Any] = {"target": target.name, "runs_by": target.runner.name, "threads": target.runner.threads}
    record |= {"temperature": args.temperature, "machine_before": before}
    if "cost" in args.parts:
        record["cost"] = costs(base)
    if "speed" in args.parts:
        given = {method: head for method, _, head in (pair.partition("=") for pair in args.draft)}
        heads = given or dict.fromkeys(args.methods.split(","))
        record |= speeds(args, base, heads)
    show(record)
    if args.output:
        write(args.output, record, before, quiet=True)


def show(record: dict[str, Any]) -> None:
    """Print both parts as Markdown."""
    print(
        blocks(
            [*([speed_table(record)] if "table" in record else []), *(cost_tables(record) if "cost" in record else [])]
        )
    )


if __name__ == "__main__":
    run(main)
