"""tau of dynamic trees against the sharpness of the draft's confidences (1 /
`--tree.confidence-temperature`; 1: the paper's).

    python runs/sharpness.py --output docs/results/sharpness.json                                      the embedded model's heads
    python runs/sharpness.py --target MODEL --draft eagle3=HEAD --draft eagle2=HEAD --output FILE.json

Bundled prompts of one turn. The draft looks at the target's noise, so at any temperature the text
is plain decoding's. Acceptance only, no times. Ratios to sharpness 1 are paired by prompt, 95 %,
bootstrap over prompts.
"""

from __future__ import annotations

from _common import ask, bundled_prompts, drafter, heads_of, parser, run, tree_of, words, write

import eyas

TREES = ("4/3/2", "6/3/2", "8/4/2", "12/5/3", "26/5/4", "60/8/10")
SHARPNESS = (1.0, 1.5, 2.0, 3.0, 5.0)


def main() -> None:
    made = parser(
        __doc__,
        heads=True,
        target=None,
        methods=("mtp,eagle3", "of the embedded model"),
        limit=24,
        temperature=0.0,
        max_new_tokens=96,
    )
    args = made.parse_args()
    llm, heads = eyas.load(args.target, method="vanilla"), heads_of(args.draft, words(args.methods))
    keys = [(method, shape, sharpness) for method in heads for shape in TREES for sharpness in SHARPNESS]
    drafters = {
        str(key): drafter(
            llm.target, key[0], {**tree_of(key[1]), "tree.confidence_temperature": 1 / key[2]}, heads[key[0]]
        )
        for key in keys
    }
    prompts, sampling = bundled_prompts(args.limit), {"temperatures": [args.temperature]}
    answers = ask(llm, drafters, prompts, args.output, max_new_tokens=args.max_new_tokens, **sampling)
    table = []
    for method, shape, sharpness in keys:
        ours, plain = (answers.of(str((method, shape, s)), args.temperature) for s in (sharpness, 1.0))
        row = {"method": method, "tree": shape, "sharpness": sharpness}
        table.append({**row, "tau": ours.tau()[0], "over_1": ours.tau_over(plain)})
    write(args.output, {"temperature": args.temperature, "prompts": len(prompts), "table": table})


if __name__ == "__main__":
    run(main)
