"""tau of dynamic trees of one size against the static tree: the comparison of depths, branches and sharpness in docs/results.md.

    python runs/tree_shapes.py --chats HELDIN.jsonl.gz --target nestling --draft HEAD

Every fifth chat from the second on, last user turn answered greedily, 96 tokens at most; differences are paired by chat, 95 % bootstrap.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from acceptance import answer, difference, drafter_of

import eyas
from eyas import tiny

STATIC = "static"
SHAPES = {STATIC: ("eagle1", {"tree.choices": "reference"})} | {
    f"26/{depth}/{branch}, sharpness {sharpness}": (
        "eagle2", {"tree.nodes": 26, "tree.depth": depth, "tree.branch": branch, "tree.sharpness": sharpness}
    )
    for sharpness in (1, 2) for depth, branch in ((5, 4), (6, 8), (8, 10))
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    llm = eyas.load(args.target, method="vanilla")
    with gzip.open(args.chats, "rt") as f:
        chats = [json.loads(line)["conversations"] for line in f][1::5][: args.limit]
    rows: dict[str, list[dict]] = {name: [] for name in SHAPES}
    drafters = {name: drafter_of(llm.target, *how, args.draft or str(tiny.FOLDER / "eagle1")) for name, how in SHAPES.items()}
    for turns in chats:
        last = max(j for j, turn in enumerate(turns) if turn["role"] == "user")
        for name, drafter in drafters.items():
            rows[name].append(answer(llm, drafter, turns[: last + 1], 96, 0.0))
    decoded = [i for i, row in enumerate(rows[STATIC]) if row["cycles"]]
    for name, found in rows.items():
        tau = sum(row["emitted"] for row in found) / sum(row["cycles"] for row in found)
        print(name, round(tau, 3), "- static:", difference([rows[STATIC][i] for i in decoded], [found[i] for i in decoded]))


if __name__ == "__main__":
    main()
