"""Cycles of many rows at once on a model with random weights: tokens a second of plain decoding and of
a tree, with simulated acceptance.

    python runs/gpu_batch.py --target out/gpu/llama-8b --context 1024 --rows 1,2,4,8,16 --rates 0.79,0.74,0.72,0.73,0.67 --output FILE.json

Every row answers a prompt of random ids. A decoder serves all rounds of its size, so recordings are
made once; rounds of all contestants are interleaved, the first warms up. Prompts are not in the
times.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from _common import drafter, interval, parser, run, tree_of, write
from rich.progress import track

from eyas import runners
from eyas.bench.simulate import parse_rates, simulated
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Request
from eyas.core.target import Target
from eyas.drafters import Drafter, find
from eyas.metrics import ratio_of_ratios

RATES, TREES = "0.79,0.74,0.72,0.73,0.67", "60/8/10,32/6/8,8/4/2"


def measure(decoder: Decoder, prompts: list[tuple[int, ...]], new: int) -> tuple[int, int, float]:
    """(tokens, cycles, seconds) of one round, of the cycles in which every row is at work."""
    for prompt in prompts:
        decoder.add(Request(prompt, new))
    tokens, cycles, seconds = 0, 0, 0.0
    while not decoder.finished:
        steps = [step for step in decoder.step() if not step.prefill]
        if len(steps) == len(prompts):
            tokens, cycles, seconds = tokens + sum(len(s.path) for s in steps), cycles + 1, seconds + steps[0].seconds
    return tokens, cycles, seconds


def main() -> None:
    made = parser(
        __doc__, target=None, device="auto", dtype="bfloat16", kernels="on", context=1024, rows="1,2,4,8,16", rates=RATES, trees=TREES,
        new=128, rounds=3,
    )  # fmt: skip
    args = made.parse_args()
    target, kind = runners.prepared(Target.load(args.target, args.dtype, args.device), args.kernels), find("eagle3")
    entered: dict[str, Drafter] = {"vanilla": drafter(target, "vanilla")}
    for shape in args.trees.split(","):
        entered[f"eagle3 {shape}"] = kind.random(target, build_options(kind.Options, tree_of(shape)))
    generator, table = torch.Generator().manual_seed(2), list[dict[str, Any]]()
    for rows in map(int, args.rows.split(",")):
        prompts = [tuple(torch.randint(3, target.vocab_size, (args.context,), generator=generator).tolist()) for _ in range(rows)]
        decoders = {name: Decoder(target, d, rows, verify=simulated(parse_rates(args.rates))) for name, d in entered.items()}
        counts: dict[str, list[tuple[int, int, float]]] = {name: [] for name in entered}
        for turn in track(range(args.rounds + 1), f"{rows} rows"):
            for name, decoder in decoders.items():
                one = measure(decoder, prompts, args.new)
                if turn:
                    counts[name].append(one)
        plain_tokens, plain_cycles, plain_seconds = zip(*counts["vanilla"], strict=True)
        for name, all_rounds in counts.items():
            tokens, cycles, seconds = zip(*all_rounds, strict=True)
            step = sum(plain_seconds) / sum(plain_cycles)
            table.append({
                "rows": rows, "name": name, "tokens_per_second": round(sum(tokens) / sum(seconds), 1),
                "over_plain": interval(ratio_of_ratios, tokens, seconds, plain_tokens, plain_seconds),
                "tau": round(sum(tokens) / sum(cycles) / rows, 2), "c": round(sum(seconds) / sum(cycles) / step, 2),
            })  # fmt: skip
            print(table[-1], flush=True)
        del decoders
        gc.collect()  # a decoder and its recordings hold each other
    write(args.output, {"context": args.context, "table": table}, quiet=True)


if __name__ == "__main__":
    run(main)
