"""How sharp a draft's chances should be held to be: tau of dynamic trees against `--tree.sharpness` (1: the paper's).

    python runs/sharpness.py --output docs/results/sharpness.json                                      the embedded model's heads
    python runs/sharpness.py --target MODEL --head eagle3=HEAD --head eagle2=HEAD --output FILE.json

Bundled prompts with one turn, at most --max-new-tokens; noise shared, so at any temperature the text is plain decoding's. Acceptance only:
no times. Ratios to sharpness 1 are paired by prompt, with 95 % intervals (bootstrap over prompts).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _common import command, interval, machine, over_over, run
from rich.progress import track

import eyas
from eyas import tiny
from eyas.api import LLM
from eyas.bench.tasks import load as load_task
from eyas.core.drafter import build_options
from eyas.drafters import Drafter, find
from eyas.train.state import write_text

TREES = ((4, 3, 2), (6, 3, 2), (8, 4, 2), (12, 5, 3), (26, 5, 4), (60, 8, 10))
SHARPNESS = (1.0, 1.5, 2.0, 3.0, 5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the embedded model")
    parser.add_argument("--head", action="append", metavar="METHOD=PATH", help="default: the embedded model's eagle3 and eagle2")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    base = eyas.load(args.target, method="vanilla")
    own = [f"{method}={tiny.HEADS[find(method).reads]}" for method in ("eagle3", "eagle2")]
    prompts = [base.request(p.turns[0], raw=p.raw)[0].prompt for p in load_task("bundled", None) if len(p.turns) == 1]
    found, before = list[dict[str, Any]](), machine()
    for method, _, head in (named.partition("=") for named in args.head or own):
        kind = find(method)

        def made(tree: tuple[int, int, int], sharpness: float, kind: type[Drafter] = kind, head: str = head) -> Drafter:
            options = {**dict(zip(("nodes", "depth", "branch"), tree, strict=True)), "sharpness": sharpness}
            return kind.from_pretrained(head, base.target, build_options(kind.Options, {"tree": options}))

        drafters = {(tree, s): made(tree, s) for tree in TREES for s in SHARPNESS}
        counts: dict[Any, list[tuple[int, int]]] = {key: [] for key in drafters}
        for prompt in track(prompts, method):
            for key, drafter in drafters.items():
                stats = LLM(base.target, drafter, base.tokenizer).generate(
                    list(prompt), max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=7
                ).stats  # fmt: skip
                counts[key].append((stats.tokens, stats.cycles))
        for (tree, s), rows in counts.items():
            tokens, cycles = zip(*rows, strict=True)
            plain_tokens, plain_cycles = zip(*counts[tree, 1.0], strict=True)
            found.append({
                "method": method, "tree": "/".join(map(str, tree)), "sharpness": s, "tau": round(sum(tokens) / sum(cycles), 3),
                "over_1": interval(over_over, (tokens, cycles, plain_tokens, plain_cycles)),
            })  # fmt: skip
            print(found[-1], flush=True)
    about = {"command": command("sharpness.py"), "machine": before, "temperature": args.temperature, "prompts": len(prompts)}
    write_text(args.output, json.dumps({**about, "table": found}, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
