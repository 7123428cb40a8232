"""Tokens per second on this machine: plain decoding, transformers' generate and EAGLE trees, interleaved prompt by prompt.

    python runs/speed.py --output docs/results/speed.json        (make bench)

The embedded model in float32, greedy, the demo's prompts, whole answers (prompt's pass included), after a warm-up; every round runs all
contestants one after the other, so that drift of the machine hits them alike. Intervals: 95 %, bootstrap over (prompt, round) pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from scipy.stats import bootstrap

import eyas
from eyas.cli.demo import PROMPTS
from eyas.drafters import find
from eyas.drafters._base import options_from
from eyas.llm import LLM

TREES = {
    "vanilla": ("vanilla", {}),
    "eagle1 chain-3": ("eagle1", {"tree.choices": "chain-3"}),
    "eagle1 reference tree": ("eagle1", {}),
    "eagle2 4/3/1": ("eagle2", {"tree.nodes": 4, "tree.depth": 3, "tree.branch": 1}),
    "eagle2 5/4/1": ("eagle2", {"tree.nodes": 5, "tree.depth": 4, "tree.branch": 1}),
    "eagle2 5/3/2": ("eagle2", {"tree.nodes": 5, "tree.depth": 3, "tree.branch": 2}),
    "eagle2 6/4/2": ("eagle2", {"tree.nodes": 6, "tree.depth": 4, "tree.branch": 2}),
    "eagle2 8/4/3": ("eagle2", {"tree.nodes": 8, "tree.depth": 4, "tree.branch": 3}),
    "eagle2 12/5/4": ("eagle2", {"tree.nodes": 12, "tree.depth": 5, "tree.branch": 4}),
    "eagle2 24/6/6": ("eagle2", {"tree.nodes": 24, "tree.depth": 6, "tree.branch": 6}),
    "eagle2 60/8/10": ("eagle2", {"tree.nodes": 60, "tree.depth": 8, "tree.branch": 10}),
}


def variant(base: LLM, method: str, options: dict[str, object]) -> LLM:
    kind, head = find(method), base.drafter
    chosen = options_from(kind.Options, options)
    drafter = kind(base.target, chosen, head.net, head.shape, head.embed_tokens) if kind.needs_weights else kind(base.target, chosen)
    return LLM(base.target, drafter, base.tokenizer)


def generate(base: LLM, ids: tuple[int, ...], new: int) -> tuple[list[int], float]:
    """The same by transformers: (new ids, seconds)."""
    ids_1T = torch.tensor([ids])
    began = time.perf_counter()
    with torch.inference_mode():
        out = base.target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=new, do_sample=False)
    return out[0, len(ids) :].tolist(), time.perf_counter() - began


def ratio_of(rows: list[dict], name: str, base: str) -> list[float]:
    """Speed of `name` over that of `base`, paired, with its interval."""
    columns = tuple(np.array([r[n][k] for r in rows], float) for n in (name, base) for k in ("tokens", "seconds"))

    def statistic(ta: np.ndarray, sa: np.ndarray, tb: np.ndarray, sb: np.ndarray, axis: int = -1) -> np.ndarray:
        return (ta.sum(axis) / sa.sum(axis)) / (tb.sum(axis) / sb.sum(axis))

    low, high = bootstrap(columns, statistic, paired=True, n_resamples=4000, method="percentile", rng=0).confidence_interval
    return [round(float(x), 2) for x in (statistic(*columns), low, high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    base, load_before = eyas.load(), os.getloadavg()[0]
    contestants = {name: variant(base, *how) for name, how in TREES.items()}
    prompts = [base.ids(p.text, raw=p.raw) for p in PROMPTS]
    rows: list[dict] = []
    for turn in range(-1, args.rounds):  # the first turn is the warm-up
        for ids in prompts[: len(prompts) if turn >= 0 else 1]:
            row: dict[str, dict] = {}
            for name, llm in contestants.items():
                result = llm.generate(list(ids), max_new_tokens=args.max_new_tokens)
                seconds, stats = result.stats.seconds, result.stats
                row[name] = {"ids": result.token_ids, "tokens": len(result.token_ids), "seconds": seconds, "emitted": stats.tokens}
                row[name] |= {"cycles": stats.cycles, "decode": seconds - stats.prefill_seconds}
            theirs, seconds = generate(base, ids, args.max_new_tokens)
            row["transformers"] = {"ids": tuple(theirs), "tokens": len(theirs), "seconds": seconds}
            if turn >= 0:
                rows.append(row)
    table = {}
    step_seconds = sum(r["vanilla"]["decode"] for r in rows) / sum(r["vanilla"]["cycles"] for r in rows)
    for name in rows[0]:
        entry = {"tokens_per_second": round(sum(r[name]["tokens"] for r in rows) / sum(r[name]["seconds"] for r in rows), 1)}
        entry |= {"vs_vanilla": ratio_of(rows, name, "vanilla"), "vs_transformers": ratio_of(rows, name, "transformers")}
        entry["equal"] = all(r[name]["ids"] == r["vanilla"]["ids"] for r in rows)
        if name != "transformers":
            cycles = sum(r[name]["cycles"] for r in rows)
            entry["tau"] = round(sum(r[name]["emitted"] for r in rows) / cycles, 2)
            entry["c"] = round(sum(r[name]["decode"] for r in rows) / cycles / step_seconds, 2)
        table[name] = entry
        print(f"{name:24} {json.dumps(entry)}")
    result = {
        "command": " ".join(["python", "runs/speed.py", *sys.argv[1:]]),
        "machine": {"cpu": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "load_before": load_before, "load_after": os.getloadavg()[0], "table": table,
    }  # fmt: skip
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
