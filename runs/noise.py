"""Shared noise: tau at T = 1 beside tau at T = 0, for drafts that look at the target's noise and
drafts that do not; tree ablations.

    python runs/noise.py --chats HELDIN.jsonl.gz --limit 40 --output docs/results/noise.json

The last user turn of each chat is answered with the embedded model and its heads, trees of 26 nodes
and chains of 5. Ids are compared with plain decoding of the same seed: trees that draw nothing
return them at any temperature; drawn ones follow the target's distribution only. Intervals: 95 %,
bootstrap over chats, paired.
"""

from __future__ import annotations

from _common import Way, ask, chat_prompts, drafters_of, parser, run, tree, write

import eyas

CHAIN, TREE = {"tree.choices": "chain-5"}, tree(26, 5, 4)
WAYS: dict[str, Way] = {
    "eagle1 chain, drawn": ("eagle1", CHAIN),
    "eagle1 chain, drawn, block": ("eagle1", {**CHAIN, "verification": "block"}),
    "eagle1 chain, shared": ("eagle1", {**CHAIN, "tree.noise": "coupled"}),
    "eagle1 tree, drawn": ("eagle1", {}),
    "eagle1 tree, shared": ("eagle1", {"tree.noise": "coupled"}),
    "eagle2, none": ("eagle2", {**TREE, "tree.noise": "none"}),
    "eagle2, shared": ("eagle2", TREE),
    "eagle3, none": ("eagle3", {**TREE, "tree.noise": "none"}),
    "eagle3, shared": ("eagle3", TREE),
    "eagle2, by confidence": ("eagle2", {**TREE, "tree.expand": "confidence"}),
    "eagle2, no rerank": ("eagle2", {**TREE, "tree.rerank": False}),
    "eagle2, by confidence, no rerank": ("eagle2", {**TREE, "tree.expand": "confidence", "tree.rerank": False}),
}
ABLATIONS = ("by confidence", "no rerank", "by confidence, no rerank")
# (a, b, temperature of a, of b): tau of a over tau of b
RATIOS = [
    ("eagle2, shared", "eagle2, shared", 1.0, 0.0),
    ("eagle2, shared", "eagle2, none", 1.0, 1.0),
    ("eagle3, shared", "eagle3, shared", 1.0, 0.0),
    ("eagle3, shared", "eagle3, none", 1.0, 1.0),
    ("eagle1 tree, shared", "eagle1 tree, drawn", 1.0, 0.0),
    ("eagle1 tree, drawn", "eagle1 tree, drawn", 1.0, 0.0),
    ("eagle1 tree, shared", "eagle1 tree, drawn", 1.0, 1.0),
    ("eagle1 chain, shared", "eagle1 chain, drawn", 1.0, 1.0),
    ("eagle1 chain, drawn, block", "eagle1 chain, drawn", 1.0, 1.0),
    *((f"eagle2, {how}", "eagle2, shared", 0.0, 0.0) for how in ABLATIONS),
]


def main() -> None:
    args = parser(__doc__, chats=True, limit=40, max_new_tokens=64).parse_args()
    llm = eyas.load(method="vanilla")
    prompts, drafters = chat_prompts(args.chats, args.limit), drafters_of(llm.target, WAYS)
    answers = ask(llm, drafters, prompts, args.output, temperatures=(0.0, 1.0), max_new_tokens=args.max_new_tokens)
    tau = {
        f"{name}, T={t:g}": {"tau": answers.of(name, t).tau(), "equal_to_plain": answers.equal_texts(name, t)}
        for name in ("vanilla", *WAYS)
        for t in (0.0, 1.0)
    }
    ratios = {
        f"{a}, T={ta:g} / {b}, T={tb:g}": answers.of(a, ta).tau_over(answers.of(b, tb)) for a, b, ta, tb in RATIOS
    }
    write(args.output, {"chats": len(prompts), "heads": "embedded", "tau": tau, "ratios of tau": ratios})


if __name__ == "__main__":
    run(main)
