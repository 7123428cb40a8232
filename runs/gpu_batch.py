"""Cycles of many rows at once on a model with random weights: tokens a second of plain decoding and of a tree, with simulated acceptance.

    python runs/gpu_batch.py --target out/gpu/llama-8b --context 1024 --rows 1,2,4,8,16 --rates 0.79,0.74,0.72,0.73,0.67 --output FILE.json

Every row answers a prompt of random ids of its own. A decoder serves all rounds of its size, so recordings are made once; rounds of all
contestants are interleaved, the first warms up. Prompts are not in the times.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from _common import command, interval, machine, over_over, run
from rich.progress import track

from eyas import runners
from eyas.bench.simulate import parse_rates, simulated
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.train.state import write_text


def rounds(decoder: Decoder, prompts: list[tuple[int, ...]], new: int) -> tuple[int, int, float]:
    """(tokens, cycles, seconds) of one round, from the first cycle of all rows on."""
    for prompt in prompts:
        decoder.add(Request(prompt, new))
    tokens, cycles, seconds = 0, 0, 0.0
    while not decoder.finished:
        steps = [step for step in decoder.step() if not step.prefill]
        if len(steps) == len(prompts):  # rows that are through leave the others with an emptier batch
            tokens, cycles, seconds = tokens + sum(len(s.path) for s in steps), cycles + 1, seconds + steps[0].seconds
    return tokens, cycles, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="on")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--rates", default="0.79,0.74,0.72,0.73,0.67")
    parser.add_argument("--trees", default="60/8/10,32/6/8,8/4/2", help="of eagle3: nodes/depth/branch")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    target = runners.prepared(Target.load(args.target, args.dtype, args.device), args.kernels)
    kind = find("eagle3")
    entered: dict[str, Drafter] = {"vanilla": find("vanilla").load(None, target)}
    for tree in args.trees.split(","):
        names = zip(("tree.nodes", "tree.depth", "tree.branch"), map(int, tree.split("/")), strict=True)
        entered[f"eagle3 {tree}"] = kind.random(target, build_options(kind.Options, dict(names)))
    dice, found = torch.Generator().manual_seed(2), list[dict[str, Any]]()
    for rows in map(int, args.rows.split(",")):
        prompts = [tuple(torch.randint(3, target.vocab_size, (args.context,), generator=dice).tolist()) for _ in range(rows)]
        decoders = {name: Decoder(target, d, rows, verify=simulated(parse_rates(args.rates))) for name, d in entered.items()}
        told: dict[str, list[tuple[int, int, float]]] = {name: [] for name in entered}
        for turn in track(range(args.rounds + 1), f"{rows} rows"):
            for name, decoder in decoders.items():
                one = rounds(decoder, prompts, args.new)
                if turn:
                    told[name].append(one)
        plain_tokens, _, plain_seconds = zip(*told["vanilla"], strict=True)
        for name, all_rounds in told.items():
            tokens, cycles, seconds = zip(*all_rounds, strict=True)
            step = sum(plain_seconds) / sum(cycle for _, cycle, _ in told["vanilla"])
            found.append({
                "rows": rows, "name": name, "tokens_per_second": round(sum(tokens) / sum(seconds), 1),
                "over_plain": interval(over_over, (tokens, seconds, plain_tokens, plain_seconds)),
                "tau": round(sum(tokens) / sum(cycles) / rows, 2), "c": round(sum(seconds) / sum(cycles) / step, 2),
            })  # fmt: skip
            print(found[-1], flush=True)
        del decoders
        gc.collect()  # a decoder and what replays it hold each other
    about = {"command": command("gpu_batch.py"), "machine": machine(), "context": args.context, "table": found}
    write_text(args.output, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
