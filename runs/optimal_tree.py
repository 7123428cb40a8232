"""Sequoia's best static tree for a head: acceptance by depth and rank on chats, then a file for `--tree.choices`.

    python runs/optimal_tree.py --chats HELDIN.jsonl.gz --nodes 26 --depth 6 --output tree.json
    python runs/optimal_tree.py --chats HELDIN.jsonl.gz --method medusa --draft DIR --target DIR --nodes 64 --temperature 1

The last user turn of each chat is answered with a wide tree, in which the nodes that are accepted most often have `ranks` children; the
rates are printed with what the best tree and the reference's are expected to yield. Any method with `--tree.choices` will do.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import _common

import eyas
from eyas import tiny
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder
from eyas.drafters import find
from eyas.drafters._optimal import count_ranks, measuring_choices, optimal_choices, rates_of, tree_value
from eyas.drafters.eagle1 import REFERENCE_TREE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="the choices, as JSON; none: they are printed only")
    parser.add_argument("--method", default="eagle1")
    parser.add_argument("--target")
    parser.add_argument("--draft", help="default: the embedded model's head for EAGLE-1")
    parser.add_argument("--nodes", type=int, default=26, help="of the tree, root included (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=5, help="of the tree (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=6, help="children whose acceptance is counted (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=12, help="nodes with children while counting (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=40, help="chats (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    llm, kind = eyas.load(args.target, method="vanilla"), find(args.method)
    options = build_options(kind.Options, {"tree.choices": measuring_choices(args.ranks, args.depth, args.inner)})
    drafter = kind.from_pretrained(args.draft or str(tiny.FOLDER / "eagle1"), llm.target, options)
    with gzip.open(args.chats, "rt") as f:
        chats = [json.loads(line)["conversations"] for line in f][: args.limit]
    cycles = []
    for turns in chats:
        last = max(j for j, turn in enumerate(turns) if turn["role"] == "user")
        request, _ = llm.request(turns[: last + 1], max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=len(turns))
        decoder = Decoder(llm.target, drafter)
        decoder.add(request)
        while not decoder.finished:
            steps = decoder.step()
            cycles += [(s.draft.tree.parents_BN[s.row].tolist(), s.path) for s in steps if s.draft is not None and not s.finish]
    counts = count_ranks(cycles, args.depth, args.ranks)
    rates = rates_of(counts)
    choices = optimal_choices(rates, args.nodes, args.depth)
    told = {
        "command": _common.command("optimal_tree.py"), "chats": len(chats), "cycles": len(cycles), "reached": counts[0],
        "rates": [[round(rate, 4) for rate in row] for row in rates], "choices": choices,
        "expected tau": round(1 + tree_value(choices, rates), 3),
    }  # fmt: skip
    if len(REFERENCE_TREE) == len(choices) and args.ranks > 3:
        told["expected tau of the reference's tree"] = round(1 + tree_value(REFERENCE_TREE, rates), 3)
    print(json.dumps(told, indent=1))
    if args.output:
        args.output.write_text(json.dumps(choices) + "\n")


if __name__ == "__main__":
    _common.run(main)
