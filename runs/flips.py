"""Where half precision makes a tree's text another than plain decoding's: how often, and how near
the tie was.

    python runs/flips.py --output docs/results/flips.json                                        the embedded model
    python runs/flips.py --target MODEL --draft eagle3=HEAD --draft eagle2=HEAD --output FILE.json

Greedy answers to the bundled prompts of one turn by the model's own forward in each dtype (kernels
compute in float32 and flip nothing). A text flips where it first differs from plain decoding's in
the same dtype. Its margin is the difference of the two tokens' logits in the float32 model behind
the common prefix; spacing is the distance of neighbouring numbers of the dtype at the larger logit,
the least that a rounding moves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from _common import ask, bundled_prompts, drafter, heads_of, parser, run, select, tree, write

import eyas
from eyas.metrics import first_difference

TREE = tree(12, 5, 3)


def main() -> None:
    args = parser(__doc__, heads=True, target=None, limit=24, max_new_tokens=96).parse_args()
    exact = eyas.load(args.target, method="vanilla", dtype="float32", kernels="off")
    prompts, heads, found = bundled_prompts(args.limit), heads_of(args.draft), dict[str, Any]()
    ids = {p.id: exact.request(p.turns[0], raw=p.raw)[0].prompt for p in prompts}
    for dtype in ("float32", "bfloat16", "float16"):
        llm = eyas.load(args.target, method="vanilla", dtype=dtype, kernels="off")
        drafters = {method: drafter(llm.target, method, TREE, head) for method, head in heads.items()}
        raw = args.output.with_name(f"{args.output.stem}_{dtype}.json")
        answers = ask(llm, drafters, prompts, raw, max_new_tokens=args.max_new_tokens)
        plain = select(answers, "vanilla")
        for method in heads:
            flips = []
            for ours, true in zip(select(answers, method), plain, strict=True):
                if (at := first_difference(ours.token_ids, true.token_ids)) is None:
                    continue
                logits_V = exact.target.open(1).prefill(0, [*ids[ours.prompt], *true.token_ids[:at]])
                a, b = (float(logits_V[answer.token_ids[at]]) for answer in (true, ours))
                spacing = torch.finfo(getattr(torch, dtype)).eps * 2 ** math.floor(math.log2(max(abs(a), abs(b))))
                flips.append({"token": at, "margin": round(a - b, 5), "spacing": round(spacing, 5)})
            tokens = sum(len(a.token_ids) for a in plain)
            found[f"{method}, {dtype}"] = {
                "texts": len(prompts),
                "tokens": tokens,
                "flipped": len(flips),
                "flips": flips,
            }
    write(args.output, {"tree": TREE, "found": found})


if __name__ == "__main__":
    run(main)
