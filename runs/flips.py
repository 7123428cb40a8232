"""Where half precision makes a tree's text another than plain decoding's: how often, and how near the tie was.

    python runs/flips.py --output docs/results/flips.json                                        the embedded model
    python runs/flips.py --target MODEL --draft eagle3=HEAD --draft eagle2=HEAD --output FILE.json

Greedy answers to the bundled prompts with one turn, by the model's own forward in each dtype (kernels compute in float32 and flip nothing).
A text flips where it first differs from plain decoding's in the same dtype. Its margin is the difference of the two tokens' logits, as the
model in float32 sees them behind the common prefix; beside it the spacing of numbers in that dtype at the larger logit, which is the least
that a rounding moves.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from _command import command, machine, run
from rich.progress import track

import eyas
from eyas import tiny
from eyas.api import LLM
from eyas.bench.tasks import load as load_task
from eyas.core.drafter import build_options
from eyas.drafters import find
from eyas.train.state import write_text

TREE = {"tree.nodes": 12, "tree.depth": 5, "tree.branch": 3}


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--draft", action="append", metavar="METHOD=PATH", help="default: the embedded model's eagle3 and eagle2")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    exact, before = eyas.load(args.target, method="vanilla", dtype="float32", kernels="off"), machine()
    own = [f"{method}={tiny.HEADS[find(method).reads]}" for method in ("eagle3", "eagle2")]
    prompts = [list(exact.request(p.turns[0], raw=p.raw)[0].prompt) for p in load_task("bundled", None) if len(p.turns) == 1]
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        plain = eyas.load(args.target, method="vanilla", dtype=dtype, kernels="off")
        said = [plain.generate(prompt, max_new_tokens=args.max_new_tokens).token_ids for prompt in track(prompts, f"plain, {dtype}")]
        for method, _, head in (named.partition("=") for named in args.draft or own):
            kind = find(method)
            llm = LLM(plain.target, kind.from_pretrained(head, plain.target, build_options(kind.Options, TREE)), plain.tokenizer)
            flips = []
            for prompt, true in zip(track(prompts, f"{method}, {dtype}"), said, strict=True):
                text = llm.generate(prompt, max_new_tokens=args.max_new_tokens).token_ids
                if (at := first_difference(text, true)) is not None:
                    logits_V = exact.target.open(1).prefill(0, [*prompt, *true[:at]])
                    a, b = (float(logits_V[ids[at]]) for ids in (true, text))
                    step = torch.finfo(getattr(torch, dtype)).eps * 2 ** math.floor(math.log2(max(abs(a), abs(b))))
                    flips.append({"token": at, "margin": round(a - b, 5), "spacing": round(step, 5)})
            tokens = sum(map(len, said))
            found[f"{method}, {dtype}"] = {"texts": len(prompts), "tokens": tokens, "flipped": len(flips), "flips": flips}
            print(f"{method}, {dtype}", found[f"{method}, {dtype}"], flush=True)
    about = {"command": command("flips.py"), "machine": before, "tree": TREE, "found": found}
    write_text(args.output, json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
