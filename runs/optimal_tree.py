"""Sequoia's best static tree for a head: acceptance by depth and rank on chats, then a file for
`--tree.choices`.

    python runs/optimal_tree.py --chats HELDIN.jsonl.gz --nodes 26 --depth 6 --output tree.json
    python runs/optimal_tree.py --chats HELDIN.jsonl.gz --method medusa --draft DIR --target DIR --nodes 64 --output tree.json

The last user turn of each chat is answered with a wide tree, in which the nodes that are accepted
most often have `--ranks` children. The rates are printed with tau as it is expected of the best
tree and of the reference's. Works for any method with `--tree.choices`.
"""

from __future__ import annotations

import json

from _common import chat_prompts, drafter, parser, run
from _optimal import count_ranks, measuring_choices, optimal_choices, rates_of, tree_value
from rich.progress import track

import eyas
from eyas.core.engine import Decoder
from eyas.drafters.eagle1 import REFERENCE_TREE
from eyas.files import write_text


def main() -> None:
    shape = {"nodes": 26, "depth": 5, "ranks": 6, "inner": 12}
    sampling = {"limit": 40, "max_new_tokens": 64, "temperature": 0.0}
    args = parser(__doc__, chats=True, method="eagle1", target=None, draft=None, **shape, **sampling).parse_args()
    llm = eyas.load(args.target, method="vanilla")
    choices = measuring_choices(args.ranks, args.depth, args.inner)
    wide = drafter(llm.target, args.method, {"tree.choices": choices}, args.draft)
    prompts, cycles = chat_prompts(args.chats, args.limit), []
    for prompt in track(prompts, "chats"):
        keywords = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
        request, _ = llm.request(list(prompt.messages), **keywords, seed=len(prompt.messages))
        decoder = Decoder(llm.target, wide)
        decoder.add(request)
        while not decoder.finished:
            steps = [s for s in decoder.step() if s.draft is not None and not s.finish]
            cycles += [(s.draft.tree.parents_BN[s.row].tolist(), s.path) for s in steps]
    counts = count_ranks(cycles, args.depth, args.ranks)
    rates = rates_of(counts)
    choices = optimal_choices(rates, args.nodes, args.depth)
    figures = {
        "chats": len(prompts),
        "cycles": len(cycles),
        "reached": counts[0],
        "rates": [[round(rate, 4) for rate in row] for row in rates],
        "choices": choices,
        "expected tau": round(1 + tree_value(choices, rates), 3),
    }
    if len(REFERENCE_TREE) == len(choices) and args.ranks > 3:
        figures["expected tau of the reference's tree"] = round(1 + tree_value(REFERENCE_TREE, rates), 3)
    print(json.dumps(figures, indent=1))
    write_text(args.output, json.dumps(choices) + "\n")


if __name__ == "__main__":
    run(main)
