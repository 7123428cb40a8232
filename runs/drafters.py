"""tau and speed of today's drafters, trained on the same tokens of the same data in the same order.

    python runs/drafters.py --chats HELDIN.jsonl.gz --draft eagle3=DIR --draft dflash=DIR --draft dspark=DIR --output FILE.json

Every chat's last user turn is answered by every method, prompt by prompt, at T = 0 and T = 1, with a chain, a small and a large tree;
texts are compared with plain decoding's. Intervals: 95 %, bootstrap over chats. "over plain" is the
ratio of tokens per second of whole answers to plain decoding's.
"""

from __future__ import annotations

from typing import Any

from _common import ask, chat_prompts, drafter, equal_texts, interval, parser, run, select, tau_interval, tree, write

import eyas
from eyas.bench.record import Answer
from eyas.metrics import ratio_of_ratios

TREES = {"chain 4": tree(5, 4, 1), "tree 8/4/2": tree(8, 4, 2), "tree 26/5/4": tree(26, 5, 4)}
TEMPERATURES = (0.0, 1.0)


def speed(answers: list[Answer], plain: list[Answer]) -> list[float | None]:
    """Tokens per second over plain decoding's, with its interval."""
    columns = [[len(a.token_ids) for a in answers], [a.seconds for a in answers]]
    return interval(ratio_of_ratios, *columns, [len(a.token_ids) for a in plain], [a.seconds for a in plain])


def main() -> None:
    args = parser(__doc__, chats=True, heads=True, target=None, limit=24, max_new_tokens=64).parse_args()
    llm = eyas.load(args.target, method="vanilla")
    heads = dict(named.split("=", 1) for named in args.draft)
    drafters = {f"{name} {shape}": drafter(llm.target, name, how, head) for name, head in heads.items() for shape, how in TREES.items()}
    prompts = chat_prompts(args.chats, args.limit)
    answers = ask(llm, drafters, prompts, args.output, temperatures=TEMPERATURES, max_new_tokens=args.max_new_tokens)
    record: dict[str, Any] = {"chats": len(prompts), "parameters": {}}
    for name in heads:
        net = drafters[f"{name} chain 4"].net
        assert net is not None
        record["parameters"][name] = sum(weight.numel() for weight in net.parameters())
    for temperature in TEMPERATURES:
        plain = select(answers, "vanilla", temperature)
        record[f"T={temperature:g}"] = {
            name: {
                "tau": tau_interval(found := select(answers, name, temperature)),
                "over plain": speed(found, plain),
                "equal texts": equal_texts(answers, name, temperature),
            }
            for name in drafters
        }
    write(args.output, record)


if __name__ == "__main__":
    run(main)
