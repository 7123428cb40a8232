"""tau of several heads of one target on the same prompts, with dynamic trees of 4, 8 and 26 nodes, greedily and at T = 1.

    python runs/compare_heads.py --head eagle2=eagle2 --head eagle3=eagle3 --chats HELDIN.jsonl.gz --output docs/results/heads_embedded.json
    python runs/compare_heads.py --head before=eagle3:OLD_DIR --head after=eagle3:NEW_DIR --output FILE.json

--head NAME=METHOD:DIR; without a DIR the embedded model's head. Without --chats the bundled prompts of one turn are answered. Every head
is compared with the first. Prompts in whose greedy answers more than 20 % of the 8-grams repeat are left out: loops flatter every head.
Intervals: 95 %, bootstrap over prompts, paired for differences and ratios.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _common import (
    ask,
    bundled_prompts,
    chat_prompts,
    drafter,
    equal_texts,
    loops,
    parser,
    run,
    select,
    tau_difference,
    tau_interval,
    tau_over,
    tree_of,
    write,
)

import eyas
from eyas.bench.record import Answer
from eyas.errors import InputError

TREES = "4/3/1,8/4/2,26/5/4"


def read_heads(arguments: list[str]) -> dict[str, tuple[str, str | None]]:
    """Name -> (method, folder of the head), of NAME=METHOD:DIR arguments."""
    heads = {}
    for argument in arguments:
        name, equals, rest = argument.partition("=")
        method, _, folder = rest.partition(":")
        if not equals or not name or not method:
            raise InputError(f"--head takes NAME=METHOD:DIR, got {argument!r}")
        heads[name] = (method, folder or None)
    if not heads:
        raise InputError("nothing to compare: give --head NAME=METHOD:DIR, once for each head")
    return heads


def trained(folder: str | None) -> dict[str, Any] | None:
    """Tokens, steps, learning rate and objective of a head's last training, if its folder says so."""
    path = Path(folder or "") / "training.json"
    if folder is None or not path.is_file():
        return None
    record = json.loads(path.read_text())
    options = record["options"]
    return {
        **{key: record[key] for key in ("tokens", "step", "seed")},
        **{key: record["config"][key] for key in ("lr", "min_lr_share", "schedule", "batch_tokens")},
        "objective": options.get("ttt.objective", options.get("train.objective")),
        "data": record["data"]["files"],
    }


def compared(answers: list[Answer], names: list[str], shapes: list[str], temperature: float) -> dict[str, Any]:
    """For each tree: tau of every head; its difference to the first head's, and its ratio."""
    out: dict[str, Any] = {}
    for shape in shapes:
        found = {name: select(answers, f"{name} {shape}", temperature) for name in names}
        first = found[names[0]]
        out[shape] = {
            "tau": {name: tau_interval(ours) for name, ours in found.items()},
            "difference": {f"{name} - {names[0]}": tau_difference(found[name], first) for name in names[1:]},
            "ratio": {f"{name} / {names[0]}": tau_over(found[name], first) for name in names[1:]},
        }
    return out


def main() -> None:
    options = parser(__doc__, target=None, limit=300, max_new_tokens=96, temperatures="0,1", trees=TREES)
    options.add_argument("--head", action="append", default=[], metavar="NAME=METHOD:DIR", help="a head; the first is the baseline")
    options.add_argument("--chats", type=Path, metavar="FILE", help="chats, JSONL; .gz too (default: the bundled prompts of one turn)")
    args = options.parse_args()
    heads, shapes = read_heads(args.head), args.trees.split(",")
    temperatures = [float(part) for part in args.temperatures.split(",")]
    llm = eyas.load(args.target, method="vanilla")
    drafters = {
        f"{name} {shape}": drafter(llm.target, method, tree_of(shape), folder)
        for name, (method, folder) in heads.items()
        for shape in shapes
    }
    prompts = chat_prompts(args.chats, args.limit) if args.chats else bundled_prompts(args.limit)
    answers = ask(llm, drafters, prompts, args.output, temperatures=temperatures, max_new_tokens=args.max_new_tokens)
    looping = loops([a for a in answers if a.temperature == 0])
    kept = [a for a in answers if a.prompt not in looping]
    record: dict[str, Any] = {
        "prompts": len(prompts), "loops": len(looping),
        "heads": {name: {"method": method, "trained": trained(folder)} for name, (method, folder) in heads.items()},
    }  # fmt: skip
    for temperature in temperatures:
        ours = select(kept, "vanilla", temperature)
        record[f"T = {temperature:g}"] = {
            "tokens": sum(len(a.token_ids) for a in ours),
            "equal_to_vanilla": {name: f"{equal_texts(kept, name, temperature)} of {len(ours)}" for name in drafters},
            **compared(kept, list(heads), shapes, temperature),
        }
    write(args.output, record)


if __name__ == "__main__":
    run(main)
