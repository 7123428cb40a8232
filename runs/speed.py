"""Tokens per second on this machine, interleaved prompt by prompt, and what passes cost.

    python runs/speed.py --output docs/results/speed.json                                     the embedded model        (make bench)
    python runs/speed.py --target MODEL --draft eagle3=HEAD --output FILE.json                another, with its head
    python runs/speed.py --parts cost --output FILE.json                                      only the cost curves

Greedy or at --temperature, the bundled prompts, whole answers. Contestants: transformers' generate; plain decoding by the model's own
forward, and by the kernels (what every ratio is over); trees of several sizes; trees by `auto`; and `auto` with a head of random weights.
Every round runs all of them on a prompt one after the other, beginning with another one each time, so that drift of the machine hits all
alike; texts are compared. Intervals: 95 %, bootstrap over prompts. Cost curves: a pass against its nodes, by the model's own forward and
by the kernels, with weights that are kept as int8, bfloat16 and float32, and rounded ones; and passes against the context.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _command import command, machine, run
from scipy.stats import bootstrap
from transformers import AutoModelForCausalLM

import eyas
from eyas import drafters, kernels, runners, tiny
from eyas.adaptive import auto
from eyas.adaptive.cost import verify_cost
from eyas.api import LLM
from eyas.bench.tasks import load as load_task
from eyas.core.drafter import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.train.state import write_text

TREES = ((4, 3, 1), (5, 4, 1), (6, 3, 2), (8, 4, 2), (12, 5, 3), (26, 5, 4))
CONTEXTS = (256, 1024, 2048, 4000)
PLAIN, OWN, THEIRS = "plain", "plain, model's own forward", "transformers generate"


def contestants(base: LLM, heads: dict[str, Path | None]) -> dict[str, LLM]:
    """Plain decoding in both ways, and each method's trees, fixed and auto."""
    target = base.target

    def plain(of: Target) -> LLM:
        return LLM(of, find("vanilla").load(None, of), base.tokenizer)

    found = {OWN: plain(Target(target.model, target.name)), PLAIN: plain(target)}
    for method, head in heads.items():
        kind = find(method)

        def made(options: dict[str, Any], kind: type[drafters.Drafter] = kind, head: Path | None = head) -> drafters.Drafter:
            chosen = build_options(kind.Options, options)
            return kind.from_pretrained(head, target, chosen) if head else kind.random(target, chosen)

        for nodes, depth, branch in TREES:
            tree = {"tree.nodes": nodes, "tree.depth": depth, "tree.branch": branch}
            found[f"{method} {nodes}/{depth}/{branch}"] = LLM(target, made(tree), base.tokenizer)
        drafter = made({})
        found[f"{method} auto"] = LLM(target, drafter, base.tokenizer, None, auto(drafter))
    useless = find(next(iter(heads))).random(target)
    found["random head, auto"] = LLM(target, useless, base.tokenizer, None, auto(useless))
    return found


def generate(base: LLM, ids: tuple[int, ...], new: int) -> tuple[tuple[int, ...], float]:
    """The same by transformers: (new ids, seconds)."""
    ids_1T = torch.tensor([ids])
    began = time.perf_counter()
    with torch.inference_mode():
        out = base.target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=new, do_sample=False)
    return tuple(out[0, len(ids) :].tolist()), time.perf_counter() - began


def ratio(rows: list[dict[str, Any]], name: str, base: str) -> list[float]:
    """Speed of `name` over that of `base`, paired, with its interval over prompts."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    columns = tuple(
        np.array([sum(row[n][key] for row in group) for group in by_prompt.values()], float)
        for n in (name, base) for key in ("tokens", "seconds")
    )  # fmt: skip

    def statistic(ta: np.ndarray, sa: np.ndarray, tb: np.ndarray, sb: np.ndarray, axis: int = -1) -> np.ndarray:
        return (ta.sum(axis) / sa.sum(axis)) / (tb.sum(axis) / sb.sum(axis))

    low, high = bootstrap(columns, statistic, paired=True, n_resamples=4000, method="percentile", rng=0).confidence_interval
    return [round(float(x), 3) for x in (statistic(*columns), low, high)]


def speeds(args: argparse.Namespace, base: LLM, heads: dict[str, Path | None]) -> dict[str, Any]:
    """The table, and every prompt's tokens and seconds."""
    entered, rows = contestants(base, heads), list[dict[str, Any]]()
    prompts = [p for p in load_task("bundled", args.limit) if len(p.turns) == 1]
    asked = [(p.id, base.request(p.turns[0], raw=p.raw)[0].prompt) for p in prompts]
    law = {"temperature": args.temperature, "seed": 7}
    for turn in range(-1, args.rounds):  # the first warms up, on two prompts
        for number, (name, ids) in enumerate(asked if turn >= 0 else asked[:2]):
            row: dict[str, Any] = {"prompt": name}
            names = list(entered)
            for contestant in [*names[number % len(names) :], *names[: number % len(names)]]:
                result = entered[contestant].generate(list(ids), max_new_tokens=args.max_new_tokens, **law)
                stats = result.stats
                row[contestant] = {
                    "tokens": len(result.token_ids), "seconds": stats.seconds, "cycles": stats.cycles, "emitted": stats.tokens,
                    "decode": stats.seconds - stats.prefill_seconds, "decided": dict(stats.decisions), "ids": result.token_ids,
                }  # fmt: skip
            if args.temperature == 0:
                theirs, seconds = generate(base, ids, args.max_new_tokens)
                row[THEIRS] = {"tokens": len(theirs), "seconds": seconds, "ids": theirs}
            for one in row.values():
                if isinstance(one, dict):
                    one["equal"] = one.pop("ids") == row[PLAIN].get("ids", ()) if one is not row[PLAIN] else True
            row[PLAIN].pop("ids")
            if turn >= 0:
                rows.append(row)
                print(f"{len(rows)} of {args.rounds * len(asked)}: {name}", flush=True)
    table = {name: _entry(rows, name) for name in rows[0] if name != "prompt"}
    return {"prompts": len(asked), "table": table, "rows": rows}


def _entry(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = [row[name] for row in rows]
    entry: dict[str, Any] = {"tokens_per_second": round(sum(r["tokens"] for r in found) / sum(r["seconds"] for r in found), 1)}
    entry |= {"over_plain": ratio(rows, name, PLAIN), "equal": f"{sum(r['equal'] for r in found)} of {len(found)}"}
    if THEIRS in rows[0]:
        entry["over_transformers"] = ratio(rows, name, THEIRS)
    if "cycles" in found[0]:
        plain = [row[PLAIN] for row in rows]
        step = sum(r["decode"] for r in plain) / sum(r["cycles"] for r in plain)
        cycles = sum(r["cycles"] for r in found)
        entry["tau"] = round(sum(r["emitted"] for r in found) / cycles, 2)
        entry["c"] = round(sum(r["decode"] for r in found) / cycles / step, 2)
    print(f"{name:28} {entry}", flush=True)
    return entry


def costs(base: LLM) -> dict[str, Any]:
    """Milliseconds of passes: own forward and kernels, by nodes; the kernels' by form of the weights, and by context."""
    target, found = base.target, dict[str, Any]()
    found["own forward, by nodes"] = verify_cost(Target(target.model, target.name))
    found["kernels, by nodes"] = verify_cost(target)
    for form in ("float32", "bfloat16"):
        with torch.no_grad():
            other = AutoModelForCausalLM.from_config(target.model.config).eval()
            for weight in other.parameters():
                weight.copy_(weight.to(getattr(torch, form)).float())
        found[f"kernels, {form} weights (random), by nodes"] = verify_cost(runners.prepared(Target(other)))
    exact = target.by_kernels and target.run.form.exact
    forms = [("bfloat16", "bfloat16")] if exact and kernels.has_avx512_bf16() else []
    forms += [("int8", "int16"), ("int8", "int8"), ("int4", "int8")] if exact and kernels.has_vnni() else []
    for weights, activations in forms:
        rounded = runners.prepared(Target(target.model), weights=weights, activations=activations)
        found[f"kernels, rounded: {weights} weights, {activations} activations, by nodes"] = verify_cost(rounded)
    contexts = [c for c in CONTEXTS if c < target.context - 64]
    found["kernels, one node, by context"] = [{"context": c, "ms": verify_cost(target, c, (1,))[0]["ms"]} for c in contexts]
    found["kernels, 8 nodes, by context"] = [{"context": c, "ms": verify_cost(target, c, (8,))[0]["ms"]} for c in contexts]
    for name, curve in found.items():
        print(f"{name:45} {curve}", flush=True)
    return found


def tables(result: dict[str, Any]) -> str:
    """Both parts as Markdown."""

    def three(found: list[float] | None) -> str:
        return "" if not found else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"

    lines = ["| | tokens/s | over plain | over transformers' generate | tau | c | equal texts |", "|---|---|---|---|---|---|---|"]
    for name, e in result.get("table", {}).items():
        figures = (e["tokens_per_second"], three(e["over_plain"]), three(e.get("over_transformers")), e.get("tau", ""), e.get("c", ""))
        lines.append(f"| {name} | {' | '.join(map(str, figures))} | {e['equal']} |")
    for name, best in _best_against_auto(result.get("rows", [])).items():
        lines.append(f"\n{name}: {best}")
    for by in ("nodes", "context"):
        curves = {name.removesuffix(f", by {by}"): curve for name, curve in result.get("cost", {}).items() if name.endswith(f"by {by}")}
        if curves:
            heads = [str(row[by]) for row in next(iter(curves.values()))]
            lines += ["", f"| ms of a pass, by {by} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
            lines += [f"| {name} | " + " | ".join(f"{row['ms']:.1f}" for row in curve) + " |" for name, curve in curves.items()]
    return "\n".join(lines)


def _best_against_auto(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Each method's `auto` over its best hand-set tree, the best of one half of the prompts judged on the other, both ways, and pooled."""
    found = {}
    names = [] if not rows else [n for n in rows[0] if n != "prompt"]
    for auto_name in (n for n in names if n.endswith(" auto") and not n.startswith("random")):
        fixed = [n for n in names if n.startswith(auto_name.removesuffix("auto")) and n != auto_name]
        judged = list[dict[str, Any]]()
        for half in (0, 1):
            chosen = max(fixed, key=lambda n: sum(r[n]["tokens"] for r in rows[half::2]) / sum(r[n]["seconds"] for r in rows[half::2]))
            judged += [{"prompt": f"{r['prompt']}", "auto": r[auto_name], "best": r[chosen]} for r in rows[1 - half :: 2]]
        found[f"{auto_name} over the best tree of the other half of the prompts"] = "{:.2f} [{:.2f}, {:.2f}]".format(
            *ratio(judged, "auto", "best")
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", action="append", default=[], metavar="METHOD=HEAD")
    parser.add_argument("--methods", default="eagle3,eagle2", help="of the embedded model")
    parser.add_argument("--parts", default="speed,cost")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--weights", default="exact", help="bfloat16, int8, int4: the target's, rounded: a target of its own")
    parser.add_argument("--activations", default="exact", help="bfloat16, int16, int8: what weights are multiplied by, rounded: likewise")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="only show what an earlier run found, as Markdown")
    args = parser.parse_args(arguments)
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return
    transformers.utils.logging.set_verbosity_error()
    heads: dict[str, Path | None] = {name: Path(head) for name, _, head in (draft.partition("=") for draft in args.draft)}
    if not args.target and not heads:
        heads = {name: tiny.HEADS[find(name).reads] for name in args.methods.split(",")}
    before = machine()
    base = eyas.load(args.target, method="vanilla", weights=args.weights, activations=args.activations)
    result: dict[str, Any] = {"command": command("speed.py"), "target": base.target.name, "runs_by": base.target.run.name}
    result |= {"threads": base.target.run.threads, "temperature": args.temperature, "machine_before": before}
    if "cost" in args.parts:
        result["cost"] = costs(base)
    if "speed" in args.parts:
        result |= speeds(args, base, heads)
    result["machine"] = machine()
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
