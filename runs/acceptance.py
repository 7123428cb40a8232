"""n-alpha and tau of EAGLE-1 (chain, static tree), EAGLE-2 and EAGLE-3 (chains, dynamic trees) on chats; the tables of docs/results.md.

    python runs/acceptance.py --chats HELDIN.jsonl.gz --output docs/results/acceptance_embedded.json
    python runs/acceptance.py --chats HELDIN.jsonl.gz --temperature 1 --output docs/results/acceptance_embedded_t1.json
    python runs/acceptance.py --chats HELDIN.jsonl.gz --target DIR --draft DIR --draft3 DIR --output docs/results/acceptance_other.json

Every chat's last user turn is answered by every method; texts are compared token by token with plain decoding. Replies in which more than
20 % of the 8-grams are repeats are reported apart: loops flatter every method. Intervals: 95 %, bootstrap over chats (paired for
differences), seeded. At T > 0 every method but the drawn static tree returns plain decoding's own ids. Interrupted runs go on where they
stopped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.progress import track
from scipy.stats import bootstrap

import eyas
from eyas import checkpoints, tiny
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.train.alpha import acceptance_by_depth

DYNAMIC = {"tree.nodes": 26, "tree.depth": 5, "tree.branch": 4}
CHAIN = {"tree.nodes": 6, "tree.depth": 5, "tree.branch": 1}
METHODS = {
    "vanilla": ("vanilla", {}),
    "eagle1 chain": ("eagle1", {"tree.choices": "chain-5"}),
    "eagle1 static tree": ("eagle1", {"tree.choices": "reference"}),
    "eagle2 dynamic tree": ("eagle2", DYNAMIC),
    "eagle3 chain": ("eagle3", CHAIN),
    "eagle3 dynamic tree": ("eagle3", DYNAMIC),
}


def drafter_of(target: Target, method: str, options: dict[str, object], head: str | None) -> Drafter:
    kind = find(method)
    weights = checkpoints.load(head) if kind.needs_weights else None
    return kind.load(weights, target, build_options(kind.Options, options))


def drafters_of(target: Target, heads: dict[str, str | None]) -> dict[str, Drafter]:
    """Every method that has a head."""
    found = {}
    for name, (method, options) in METHODS.items():
        head = heads.get("eagle3" if method == "eagle3" else "eagle1")
        if head or not find(method).needs_weights:
            found[name] = drafter_of(target, method, options, head)
    return found


def repeated_share(tokens: list[int], n: int = 8) -> float:
    """Share of n-grams that occurred before in the same reply."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def answer(llm: eyas.LLM, drafter: Drafter, messages: list[dict[str, str]], new_tokens: int, temperature: float) -> dict[str, object]:
    request, _ = llm.request(messages, max_new_tokens=new_tokens, temperature=temperature, seed=len(messages[-1]["content"]))
    decoder, steps, began = Decoder(llm.target, drafter), [], time.perf_counter()
    decoder.add(request)
    while not decoder.finished:
        steps += decoder.step()
    cycles = [s for s in steps if not s.prefill]
    return {
        "tokens": [t for s in steps for t in s.tokens],
        "cycles": len(cycles),
        "emitted": sum(len(s.tokens) for s in cycles),
        "by_depth": acceptance_by_depth(cycles, 5),
        "seconds": time.perf_counter() - began,
    }


def interval(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """A ratio of sums with its 95 % interval, chats resampled."""

    def ratio(v: np.ndarray, w: np.ndarray, axis: int = -1) -> np.ndarray:
        return v.sum(axis) / w.sum(axis)

    low, high = bootstrap((values, weights), ratio, paired=True, n_resamples=4000, method="percentile", rng=0).confidence_interval
    return [round(float(x), 3) for x in (ratio(values, weights), low, high)]


def difference(a: list[dict], b: list[dict]) -> list[float]:
    """tau(b) - tau(a), paired by chat."""
    columns = tuple(np.array([r[k] for r in rows], float) for rows in (a, b) for k in ("emitted", "cycles"))

    def statistic(ea: np.ndarray, ca: np.ndarray, eb: np.ndarray, cb: np.ndarray, axis: int = -1) -> np.ndarray:
        return eb.sum(axis) / cb.sum(axis) - ea.sum(axis) / ca.sum(axis)

    low, high = bootstrap(columns, statistic, paired=True, n_resamples=4000, method="percentile", rng=0).confidence_interval
    return [round(float(x), 3) for x in (statistic(*columns), low, high)]


def summary(rows: dict[str, list[dict]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, answers in rows.items():
        kept = [r for r in answers if r["cycles"]]
        out[name] = {"chats": len(answers), "tau": interval(*(np.array([r[k] for r in kept], float) for k in ("emitted", "cycles")))}
        if "chain" in name:
            counts = np.array([r["by_depth"] for r in kept], float)  # chats, depth, (reached, accepted)
            out[name]["n-alpha"] = [interval(counts[:, d, 1], counts[:, d, 0]) for d in range(5)]
    decoded = [i for i, r in enumerate(rows["vanilla"]) if r["cycles"]]
    chains, trees = ([n for n in rows if ("chain" in n) == chain and n != "vanilla"] for chain in (True, False))
    out["tau differences"] = {
        f"{b} - {a}": difference([rows[a][i] for i in decoded], [rows[b][i] for i in decoded])
        for a, b in [*pairwise(trees), *pairwise(chains), (chains[0], trees[0])]
    }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft", help="the head of EAGLE-1 and EAGLE-2; default: the embedded model's")
    parser.add_argument("--draft3", help="the head of EAGLE-3; default: the embedded model's")
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    llm = eyas.load(args.target, method="vanilla")
    with gzip.open(args.chats, "rt") as f:
        chats = [json.loads(line)["conversations"] for line in f][: args.limit]
    embedded = {"eagle1": str(tiny.FOLDER / "eagle1"), "eagle3": str(tiny.FOLDER / "eagle3")} if args.target is None else {}
    drafters = drafters_of(llm.target, {"eagle1": args.draft or embedded.get("eagle1"), "eagle3": args.draft3 or embedded.get("eagle3")})
    raw = args.output.with_suffix(".raw.jsonl")
    raw.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    began = time.perf_counter()
    with raw.open("a") as f:
        for i in track(range(len(done), len(chats)), description="chats"):
            turns = chats[i]
            last = max(j for j, t in enumerate(turns) if t["role"] == "user")
            row = {name: answer(llm, d, turns[: last + 1], args.max_new_tokens, args.temperature) for name, d in drafters.items()}
            done.append(row)
            print(json.dumps(row), file=f, flush=True)
    rows = {name: [d[name] for d in done] for name in drafters}
    same = {name: sum(a["tokens"] == v["tokens"] for a, v in zip(rows[name], rows["vanilla"], strict=True)) for name in drafters}
    loops = [repeated_share(v["tokens"]) > 0.2 for v in rows["vanilla"]]

    def part(wanted: bool) -> dict[str, object]:
        return summary({name: [r for r, loop in zip(found, loops, strict=True) if loop == wanted] for name, found in rows.items()})

    result = {
        "command": " ".join(["python", "runs/acceptance.py", *sys.argv[1:]]),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "chats": len(done),
        "new_tokens": sum(len(v["tokens"]) for v in rows["vanilla"]),
        "temperature": args.temperature,
        "equal_to_vanilla": same,
        "loops": sum(loops),
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "without_loops": part(False),
        "loops_only": part(True) if sum(loops) > 1 else {},
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
