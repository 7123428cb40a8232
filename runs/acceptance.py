"""n-alpha and tau of EAGLE-1 (chain, static tree), EAGLE-2, EAGLE-3 and an MTP module (chain, dynamic trees) on chats.

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

from _common import Answers, ask, chat_prompts, drafter, parser, run, tree, write

import eyas

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name -> head, method, options
    "eagle1 chain": ("eagle1", "eagle1", {"tree.choices": "chain-5"}),
    "eagle1 static tree": ("eagle1", "eagle1", {"tree.choices": "reference"}),
    "eagle2 dynamic tree": ("eagle1", "eagle2", tree(26, 5, 4)),
    "eagle3 chain": ("eagle3", "eagle3", tree(6, 5, 1)),
    "eagle3 dynamic tree": ("eagle3", "eagle3", tree(26, 5, 4)),
    "mtp chain": ("mtp", "mtp", tree(6, 5, 1)),
    "mtp dynamic tree": ("mtp", "mtp", tree(26, 5, 4)),
}


def summary(answers: Answers, names: list[str], temperature: float) -> dict[str, Any]:
    """tau and n-alpha of every method, and differences of tau."""
    by_name = {name: answers.of(name, temperature) for name in names}
    out: dict[str, Any] = {}
    for name, ours in by_name.items():
        out[name] = {"chats": len(ours), "tau": ours.tau()}
        if "chain" in name:
            out[name]["n-alpha"] = ours.alphas()
    chains, trees = ([name for name in names if kind in name] for kind in ("chain", "tree"))
    pairs = [*pairwise(trees), *pairwise(chains), (chains[0], trees[0])]
    out["tau differences"] = {f"{b} - {a}": by_name[b].tau_difference(by_name[a]) for a, b in pairs}
    return out


def main() -> None:
    shape = {"target": None, "limit": 300, "max_new_tokens": 96, "temperature": 0.0}
    args = parser(__doc__, chats=True, heads=True, **shape).parse_args()
    llm = eyas.load(args.target, method="vanilla")
    heads = dict(named.split("=", 1) for named in args.draft)
    drafters = {
        name: drafter(llm.target, method, options, heads.get(head))
        for name, (head, method, options) in METHODS.items()
        if head in heads or not args.target
    }
    prompts, temperature = chat_prompts(args.chats, args.limit), args.temperature
    sampling = {"temperatures": [temperature], "max_new_tokens": args.max_new_tokens}
    answers = ask(llm, drafters, prompts, args.output, **sampling)
    names, looping = ["vanilla", *drafters], answers.loops()
    others = {prompt.id for prompt in prompts} - looping
    record = {
        "chats": len(prompts),
        "new_tokens": answers.of("vanilla", temperature).tokens,
        "temperature": temperature,
        "equal_to_vanilla": {name: answers.equal_texts(name, temperature) for name in names},
        "loops": len(looping),
        "without_loops": summary(answers.without(looping), names, temperature),
        "loops_only": summary(answers.without(others), names, temperature) if len(looping) > 1 else {},
    }
    write(args.output, record)


if __name__ == "__main__":
    run(main)
