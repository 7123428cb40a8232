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
from collections.abc import Iterator
from typing import Any

import torch
from _common import Answers, ask, bundled_prompts, drafter, heads_of, parser, run, tree, write

import eyas
from eyas.api import LLM
from eyas.metrics import first_difference

TREE = tree(12, 5, 3)


def flips(exact: LLM, dtype: str, ours: Answers, plain: Answers) -> Iterator[dict[str, float]]:
    """Where each text flips, its margin in the exact model, and the spacing of the dtype there."""
    asked = {prompt.id: prompt for prompt in bundled_prompts()}
    for answer, true in zip(ours, plain, strict=True):
        at = first_difference(answer.token_ids, true.token_ids)
        if at is None:
            continue
        prompt = asked[answer.prompt]
        ids = exact.request(prompt.turns[0], raw=prompt.raw)[0].prompt
        logits_V = exact.target.open(1).prefill(0, [*ids, *true.token_ids[:at]])
        a, b = (float(logits_V[side.token_ids[at]]) for side in (true, answer))
        spacing = torch.finfo(getattr(torch, dtype)).eps * 2 ** math.floor(math.log2(max(abs(a), abs(b))))
        yield {"token": at, "margin": round(a - b, 5), "spacing": round(spacing, 5)}


def main() -> None:
    args = parser(__doc__, heads=True, target=None, limit=24, max_new_tokens=96).parse_args()
    exact = eyas.load(args.target, method="vanilla", dtype="float32", kernels="off")
    prompts, heads, rows = bundled_prompts(args.limit), heads_of(args.draft), dict[str, Any]()
    for dtype in ("float32", "bfloat16", "float16"):
        llm = eyas.load(args.target, method="vanilla", dtype=dtype, kernels="off")
        drafters = {method: drafter(llm.target, method, TREE, head) for method, head in heads.items()}
        raw = args.output.with_name(f"{args.output.stem}_{dtype}.json")
        answers = ask(llm, drafters, prompts, raw, max_new_tokens=args.max_new_tokens)
        plain = answers.of("vanilla")
        for method in heads:
            flipped = list(flips(exact, dtype, answers.of(method), plain))
            counts = {"texts": len(prompts), "tokens": plain.tokens, "flipped": len(flipped)}
            rows[f"{method}, {dtype}"] = {**counts, "flips": flipped}
    write(args.output, {"tree": TREE, "found": rows})


if __name__ == "__main__":
    run(main)
