"""Tokens per second on this machine, interleaved prompt by prompt, and what passes cost.

    python runs/speed.py --output docs/results/speed.json                                     the embedded model        (make bench)
    python runs/speed.py --target MODEL --draft eagle3=HEAD --output FILE.json                another, with its head
    python runs/speed.py --parts cost --output FILE.json                                      only the cost curves

Greedy or at --temperature, the bundled prompts of one turn, whole answers. Contestants:
transformers' generate; plain decoding by the model's own forward, and by the kernels (what every
ratio is over); trees of several sizes; trees by `auto`; and `auto` with a head of random weights.
`eyas.bench` asks all of them prompt by prompt, another one first each time, so that drift of the
machine hits all alike; texts are compared. Intervals: 95 %, bootstrap over prompts. Cost curves: a
pass against its nodes, by the model's own forward and by the kernels, with weights kept as int8,
bfloat16 and float32, and rounded ones; and passes against the context.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _common import RESAMPLES, bundled_prompts, drafter, heads_of, machine, progress, run, write
from results import cost_tables, speed_table
from transformers import AutoModelForCausalLM

import eyas
from eyas import kernels, runners
from eyas.adaptive import auto
from eyas.adaptive.cost import verify_cost
from eyas.api import LLM
from eyas.bench.contestants import Contestant, Drafting, Transformers
from eyas.bench.record import Answer
from eyas.bench.rows import speedup
from eyas.bench.run import Bench
from eyas.core.target import Target
from eyas.drafters import find
from eyas.metrics import relative_cycle_cost, tau

TREES = ((4, 3, 1), (5, 4, 1), (6, 3, 2), (8, 4, 2), (12, 5, 3), (26, 5, 4))
CONTEXTS = (256, 1024, 2048, 4000)
PLAIN, OWN, THEIRS = "plain", "plain, model's own forward", "transformers generate"
Options = dict[str, Any]


def contestants(base: LLM, heads: dict[str, str | None], greedy: bool) -> list[Contestant]:
    """Plain decoding in both ways, each method's trees, fixed and auto, and transformers' generate."""
    target = base.target
    entered: list[Contestant] = [
        Drafting("vanilla", base.drafter),
        Drafting(OWN, find("vanilla").load(None, Target(target.model, target.name))),
    ]
    for method, head in heads.items():
        for nodes, depth, branch in TREES:
            options = {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch}
            entered.append(Drafting(f"{method} {nodes}/{depth}/{branch}", drafter(target, method, options, head)))
        made = drafter(target, method, {}, head)
        entered.append(Drafting(f"{method} auto", made, policy=auto(made)))
    useless = find(next(iter(heads))).random(target)
    entered.append(Drafting("random head, auto", useless, policy=auto(useless)))
    return [*entered, *([Transformers(target, THEIRS)] if greedy else [])]


def speeds(args: argparse.Namespace, base: LLM, heads: dict[str, str | None]) -> dict[str, Any]:
    """The table, and every prompt's tokens and seconds."""
    prompts = bundled_prompts(args.limit)
    asked = [replace(p, id=f"{p.id}#{turn}") for turn in range(args.rounds) for p in prompts]
    entered = contestants(base, heads, greedy=args.temperature == 0)
    bench = Bench(base, entered, asked, (args.temperature,), args.max_new_tokens, {"seed": 7})
    with tempfile.TemporaryDirectory() as folder, progress() as on_prompt:
        answers = bench.run(Path(folder), on_prompt)
    names = {contestant.name: PLAIN if contestant.name == "vanilla" else contestant.name for contestant in entered}
    by_name = {
        label: [a.replace(prompt=a.prompt.partition("#")[0]) for a in answers if a.method == name]
        for name, label in names.items()
    }
    table = {name: entry(ours, by_name[PLAIN], by_name.get(THEIRS)) for name, ours in by_name.items()}
    return {"prompts": len(prompts), "table": table, "rows": rows(by_name)}


def entry(ours: Sequence[Answer], plain: Sequence[Answer], theirs: Sequence[Answer] | None) -> dict[str, Any]:
    """A line of the table."""

    def over(base: Sequence[Answer]) -> list[float | None]:
        return [
            None if x is None else round(x, 3)
            for x in speedup(ours, base, whole=True, resamples=RESAMPLES) or (None,) * 3
        ]

    cycles, plain_cycles = (sum(len(a.cycles) for a in side) for side in (ours, plain))
    seconds, plain_seconds = (sum(a.decode_seconds for a in side) for side in (ours, plain))
    line: dict[str, Any] = {
        "tokens_per_second": round(sum(len(a.token_ids) for a in ours) / sum(a.seconds for a in ours), 1),
        "over_plain": over(plain),
        "equal": f"{sum(a.token_ids == b.token_ids for a, b in zip(ours, plain, strict=True))} of {len(ours)}",
    }
    if theirs is not None:
        line["over_transformers"] = over(theirs)
    if ours is not theirs:
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
    target, found = base.target, dict[str, Any]()
    found["own forward, by nodes"] = verify_cost(Target(target.model, target.name))
    found["kernels, by nodes"] = verify_cost(target)
    for form in ("float32", "bfloat16"):
        with torch.no_grad():
            other = AutoModelForCausalLM.from_config(target.model.config).eval()
            for weight in other.parameters():
                weight.copy_(weight.to(getattr(torch, form)).float())
        found[f"kernels, {form} weights (random), by nodes"] = verify_cost(runners.prepared(Target(other)))
    exact = target.run.name == "kernels" and target.run.form.exact
    forms = [("bfloat16", "bfloat16")] if exact and kernels.has_avx512_bf16() else []
    forms += [("int8", "int16"), ("int8", "int8"), ("int4", "int8")] if exact and kernels.has_vnni() else []
    for weights, activations in forms:
        rounded = runners.prepared(Target(target.model), weights=weights, activations=activations)
        found[f"kernels, rounded: {weights} weights, {activations} activations, by nodes"] = verify_cost(rounded)
    contexts = [c for c in CONTEXTS if c < target.context - 64]
    for nodes, label in ((1, "one node"), (8, "8 nodes")):
        curve = [{"context": c, "ms": verify_cost(target, c, (nodes,))[0]["ms"]} for c in contexts]
        found[f"kernels, {label}, by context"] = curve
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--draft", action="append", default=[], metavar="METHOD=HEAD")
    parser.add_argument("--methods", default="eagle3,eagle2", help="of the embedded model")
    parser.add_argument("--parts", default="speed,cost")
    parser.add_argument("--limit", type=int, help="prompts")
    parser.add_argument(
        "--weights", default="exact", help="bfloat16, int8, int4: the target's, rounded: a target of its own"
    )
    parser.add_argument("--activations", default="exact", help="bfloat16, int16, int8: likewise")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="only show an earlier record, as Markdown")
    args = parser.parse_args(arguments)
    if args.table:
        show(json.loads(args.table.read_text()))
        return
    transformers.utils.logging.set_verbosity_error()
    before = machine()
    base = eyas.load(args.target, method="vanilla", weights=args.weights, activations=args.activations)
    record: dict[str, Any] = {
        "target": base.target.name,
        "runs_by": base.target.run.name,
        "threads": base.target.run.threads,
    }
    record |= {"temperature": args.temperature, "machine_before": before}
    if "cost" in args.parts:
        record["cost"] = costs(base)
    if "speed" in args.parts:
        record |= speeds(args, base, heads_of(args.draft, args.methods.split(",")))
    show(record)
    if args.output:
        write(args.output, record, before, quiet=True)


def show(record: dict[str, Any]) -> None:
    """Both parts as Markdown."""
    print(
        *([speed_table(record)] if "table" in record else []),
        *([cost_tables(record)] if "cost" in record else []),
        sep="\n",
    )


if __name__ == "__main__":
    run(main)
