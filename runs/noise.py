"""Shared noise: tau at T = 1 beside tau at T = 0, for drafts that look at the target's noise and drafts that do not; the tree's ablations.

    python runs/noise.py --chats HELDIN.jsonl.gz --limit 40

The last user turn of each chat is answered with the embedded model and its heads, trees of 26 nodes and chains of 5. Ids are compared with
plain decoding of the same seed: chosen trees return them at any temperature, drawn ones follow their law only. Intervals: 95 %, bootstrap
over chats, paired, seeded. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from _common import Rows, command, interval, machine, over, over_over, run
from rich.progress import track

import eyas
from eyas import checkpoints, tiny
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder
from eyas.drafters import Drafter, find

TREE = {"tree.nodes": 26, "tree.depth": 5, "tree.branch": 4}
CHAIN = {"tree.choices": "chain-5"}
BOTH, GREEDY, SAMPLED = (0.0, 1.0), (0.0,), (1.0,)
WAYS: dict[str, tuple[str, dict[str, object], tuple[float, ...]]] = {  # name -> method, options, temperatures
    "vanilla": ("vanilla", {}, BOTH),
    "eagle1 chain, drawn": ("eagle1", CHAIN, BOTH),
    "eagle1 chain, drawn, block": ("eagle1", {**CHAIN, "verification": "block"}, SAMPLED),
    "eagle1 chain, shared": ("eagle1", {**CHAIN, "tree.noise": "shared"}, SAMPLED),
    "eagle1 tree, drawn": ("eagle1", {}, BOTH),
    "eagle1 tree, shared": ("eagle1", {"tree.noise": "shared"}, SAMPLED),
    "eagle2, none": ("eagle2", {**TREE, "tree.noise": "none"}, SAMPLED),
    "eagle2, shared": ("eagle2", TREE, BOTH),
    "eagle3, none": ("eagle3", {**TREE, "tree.noise": "none"}, SAMPLED),
    "eagle3, shared": ("eagle3", TREE, BOTH),
    "eagle2, by confidence": ("eagle2", {**TREE, "tree.expand": "confidence"}, GREEDY),
    "eagle2, no rerank": ("eagle2", {**TREE, "tree.rerank": False}, GREEDY),
    "eagle2, by confidence, no rerank": ("eagle2", {**TREE, "tree.expand": "confidence", "tree.rerank": False}, GREEDY),
}
# (a, b, temperature of a, of b): tau of a over tau of b
RATIOS = [
    *((f"{head}, shared", f"{head}, {other}", 1.0, t) for head in ("eagle2", "eagle3") for other, t in (("shared", 0.0), ("none", 1.0))),
    ("eagle1 tree, shared", "eagle1 tree, drawn", 1.0, 0.0),
    ("eagle1 tree, drawn", "eagle1 tree, drawn", 1.0, 0.0),
    ("eagle1 tree, shared", "eagle1 tree, drawn", 1.0, 1.0),
    ("eagle1 chain, shared", "eagle1 chain, drawn", 1.0, 1.0),
    ("eagle1 chain, drawn, block", "eagle1 chain, drawn", 1.0, 1.0),
    *((f"eagle2, {how}", "eagle2, shared", 0.0, 0.0) for how in ("by confidence", "no rerank", "by confidence, no rerank")),
]


def drafter_of(llm: eyas.LLM, method: str, options: dict[str, object]) -> Drafter:
    kind = find(method)
    weights = checkpoints.load(str(tiny.FOLDER / ("eagle3" if method == "eagle3" else "eagle1"))) if kind.needs_weights else None
    return kind.load(weights, llm.target, build_options(kind.Options, options))


def answer(llm: eyas.LLM, drafter: Drafter, messages: list[dict[str, str]], new: int, temperature: float, seed: int) -> dict[str, object]:
    request, _ = llm.request(messages, max_new_tokens=new, temperature=temperature, seed=seed)
    decoder, steps = Decoder(llm.target, drafter), []
    decoder.add(request)
    while not decoder.finished:
        steps += decoder.step()
    cycles = [s for s in steps if not s.prefill]
    return {"tokens": [t for s in steps for t in s.tokens], "cycles": len(cycles), "emitted": sum(len(s.tokens) for s in cycles)}


def summary(rows: Rows, chats: int) -> dict[str, object]:
    def found(name: str, temperature: float) -> list[dict]:
        return [rows.of(name, temperature, i)[0] for i in range(chats)]

    def columns(name: str, temperature: float) -> list[list[int]]:
        return [[row[key] for row in found(name, temperature)] for key in ("emitted", "cycles")]

    tau = {
        f"{name}, T={t:g}": {
            "tau": interval(over, columns(name, t)),
            "equal_to_plain": sum(a["tokens"] == b["tokens"] for a, b in zip(found(name, t), found("vanilla", t), strict=True)),
        }
        for name, (_, _, temperatures) in WAYS.items()
        for t in temperatures
    }
    ratios = {f"{a}, T={ta:g} / {b}, T={tb:g}": interval(over_over, [*columns(a, ta), *columns(b, tb)]) for a, b, ta, tb in RATIOS}
    return {"tau": tau, "ratios of tau": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("docs/results/noise.json"))
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()
    llm = eyas.load(method="vanilla")
    with gzip.open(args.chats, "rt") as f:
        chats = [json.loads(line)["conversations"] for line in f][: args.limit]
    rows = Rows(args.output.with_suffix(".raw.jsonl"), {"chats": args.chats.name, "new": args.max_new_tokens})
    drafters = {name: drafter_of(llm, method, options) for name, (method, options, _) in WAYS.items()}
    for i, turns in enumerate(track(chats, description="chats")):
        last = max(j for j, turn in enumerate(turns) if turn["role"] == "user")
        for name, (_, _, temperatures) in WAYS.items():
            for t in temperatures:
                if [name, t, i] not in rows:
                    rows.add([name, t, i], answer(llm, drafters[name], turns[: last + 1], args.max_new_tokens, t, i))
    result = {"command": command("noise.py"), "machine": machine(), "chats": len(chats), "heads": "embedded", **summary(rows, len(chats))}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run(main)
