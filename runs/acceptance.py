"""n-alpha and tau of EAGLE-1 (chain, static tree), EAGLE-2 and EAGLE-3 (chain, dynamic trees) on chats.

    python runs/acceptance.py --chats HELDIN.jsonl.gz --output docs/results/acceptance_embedded.json
    python runs/acceptance.py --chats HELDIN.jsonl.gz --temperature 1 --output docs/results/acceptance_embedded_t1.json
    python runs/acceptance.py --chats HELDIN.jsonl.gz --target DIR --draft eagle1=DIR --draft eagle3=DIR --output FILE.json

Every chat's last user turn is answered by every method; texts are compared with plain decoding's.
Chats in whose answers more than 20 % of the 8-grams repeat are reported apart: loops flatter every
method. Intervals: 95 %, bootstrap over chats, paired for differences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from _common import (
    alpha_intervals,
    ask,
    chat_prompts,
    drafter,
    equal_texts,
    loops,
    parser,
    run,
    select,
    tau_difference,
    tau_interval,
    tree,
    write,
)

import eyas
from eyas.bench.record import Answer

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name -> head, method, options
    "eagle1 chain": ("eagle1", "eagle1", {"tree.choices": "chain-5"}),
    "eagle1 static tree": ("eagle1", "eagle1", {"tree.choices": "reference"}),
    "eagle2 dynamic tree": ("eagle1", "eagle2", tree(26, 5, 4)),
    "eagle3 chain": ("eagle3", "eagle3", tree(6, 5, 1)),
    "eagle3 dynamic tree": ("eagle3", "eagle3", tree(26, 5, 4)),
}


def summary(answers: list[Answer], names: list[str], temperature: float) -> dict[str, Any]:
    """tau and n-alpha of every method, and differences of tau."""
    found = {name: select(answers, name, temperature) for name in names}
    out: dict[str, Any] = {}
    for name, ours in found.items():
        out[name] = {"chats": len(ours), "tau": tau_interval(ours)}
        if "chain" in name:
            out[name]["n-alpha"] = alpha_intervals(ours)
    chains = [name for name in names if "chain" in name]
    trees = [name for name in names if "tree" in name]
    pairs = [*pairwise(trees), *pairwise(chains), (chains[0], trees[0])]
    out["tau differences"] = {f"{b} - {a}": tau_difference(found[b], found[a]) for a, b in pairs}
    return out


def main() -> None:
    args = parser(
        __doc__, chats=True, heads=True, target=None, limit=300, max_new_tokens=96, temperature=0.0
    ).parse_args()
    llm = eyas.load(args.target, method="vanilla")
    heads = dict(named.split("=", 1) for named in args.draft)
    entered = {
        name: (heads.get(head), *how) for name, (head, *how) in METHODS.items() if head in heads or not args.target
    }
    drafters = {name: drafter(llm.target, method, options, head) for name, (head, method, options) in entered.items()}
    prompts = chat_prompts(args.chats, args.limit)
    answers = ask(
        llm, drafters, prompts, args.output, temperatures=(args.temperature,), max_new_tokens=args.max_new_tokens
    )
    names, looping = ["vanilla", *drafters], loops(answers)
    apart = [a for a in answers if a.prompt in looping]
    record = {
        "chats": len(prompts),
        "new_tokens": sum(len(a.token_ids) for a in select(answers, "vanilla", args.temperature)),
        "temperature": args.temperature,
        "equal_to_vanilla": {name: equal_texts(answers, name, args.temperature) for name in names},
        "loops": len(looping),
        "without_loops": summary([a for a in answers if a.prompt not in looping], names, args.temperature),
        "loops_only": summary(apart, names, args.temperature) if len(looping) > 1 else {},
    }
    write(args.output, record)


if __name__ == "__main__":
    run(main)
