"""tau of several heads of one target on the same prompts, with dynamic trees of 4, 8 and 26 nodes,
greedily and at T = 1.

    python runs/compare_heads.py --head eagle2=eagle2 --head eagle3=eagle3 --chats HELDIN.jsonl.gz --output docs/results/heads_embedded.json
    python runs/compare_heads.py --head before=eagle3:OLD_DIR --head after=eagle3:NEW_DIR --speed --output FILE.json

--head NAME=METHOD:DIR; without a DIR the embedded model's head. Every head is compared with those
named before it. Without --chats the bundled prompts of one turn are answered; --skip leaves out the
first chats, --trained-on those that also stand in a file. --speed compares tokens/s of whole
answers too, for which the machine should have nothing else to do. Prompts in whose greedy answers
more than 20 % of the 8-grams repeat are left out of tau: loops flatter every head. Intervals: 95 %,
bootstrap over prompts, paired for differences and ratios.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from _common import (
    RESAMPLES,
    ask,
    bundled_prompts,
    chat_prompts,
    drafter,
    equal_texts,
    loops,
    open_text,
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
from eyas.bench.rows import speedup
from eyas.bench.run import VANILLA
from eyas.bench.tasks import Prompt
from eyas.errors import InputError
from eyas.metrics import Interval

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


def conversations(path: Path) -> list[str]:
    """Each chat of a JSONL file, all of its turns, as one string."""
    with open_text(path) as lines:
        records = [json.loads(line) for line in lines]
    return [json.dumps(record.get("messages", record.get("conversations"))) for record in records]


def asked(args: argparse.Namespace) -> list[Prompt]:
    """The chats behind the first --skip, less those that stand in the file --trained-on too;
    without --chats the bundled prompts."""
    if args.chats is None:
        return bundled_prompts(args.limit)
    seen = set(conversations(args.trained_on)) if args.trained_on else set[str]()
    in_both = {f"chat/{number}" for number, chat in enumerate(conversations(args.chats)) if chat in seen}
    return [prompt for prompt in chat_prompts(args.chats)[args.skip :] if prompt.id not in in_both][: args.limit]


def rounded(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [None if x is None else round(x, 4) for x in interval]


def speeds(answers: list[Answer], names: list[str], shapes: list[str], temperature: float) -> dict[str, Any]:
    """For each tree: whole answers' tokens/s with every head, over plain decoding's and over other
    heads'; the median time of a cycle and of its draft."""
    plain, out = select(answers, VANILLA, temperature), dict[str, Any]()

    def over(ours: list[Answer], baseline: list[Answer]) -> list[float | None] | None:
        return rounded(speedup(ours, baseline, whole=True, resamples=RESAMPLES))

    for shape in shapes:
        found = {name: select(answers, f"{name} {shape}", temperature) for name in names}
        tokens = {name: sum(len(answer.token_ids) for answer in ours) for name, ours in found.items()}
        out[shape] = {
            "tokens_per_second": {
                name: round(tokens[name] / sum(answer.seconds for answer in ours), 1) for name, ours in found.items()
            },
            "median_cycle_ms": {
                name: round(1e3 * median(c.seconds for answer in ours for c in answer.cycles), 3)
                for name, ours in found.items()
            },
            "median_draft_ms": {
                name: round(1e3 * median(c.draft for answer in ours for c in answer.cycles if c.draft is not None), 3)
                for name, ours in found.items()
            },
            "over_plain": {name: over(ours, plain) for name, ours in found.items()},
            "ratio": {f"{b} / {a}": over(found[b], found[a]) for a, b in combinations(names, 2)},
        }
    return out


def compared(answers: list[Answer], names: list[str], shapes: list[str], temperature: float) -> dict[str, Any]:
    """For each tree: tau of every head; its difference and its ratio to those of the heads before it."""
    out: dict[str, Any] = {}
    for shape in shapes:
        found = {name: select(answers, f"{name} {shape}", temperature) for name in names}
        out[shape] = {
            "tau": {name: tau_interval(ours) for name, ours in found.items()},
            "difference": {f"{b} - {a}": tau_difference(found[b], found[a]) for a, b in combinations(names, 2)},
            "ratio": {f"{b} / {a}": tau_over(found[b], found[a]) for a, b in combinations(names, 2)},
        }
    return out


def main() -> None:
    options = parser(__doc__, target=None, limit=300, skip=0, max_new_tokens=96, temperatures="0,1", trees=TREES)
    options.add_argument("--head", action="append", default=[], metavar="NAME=METHOD:DIR", help="a head to compare")
    options.add_argument(
        "--chats", type=Path, metavar="FILE", help="chats, JSONL; .gz too (default: the bundled prompts of one turn)"
    )
    options.add_argument(
        "--trained-on", type=Path, metavar="FILE", help="chats, JSONL; .gz too: these are left out of --chats"
    )
    options.add_argument(
        "--speed", action="store_true", help="also tokens per second; all prompts, those that loop too"
    )
    args = options.parse_args()
    heads, shapes = read_heads(args.head), args.trees.split(",")
    temperatures = [float(part) for part in args.temperatures.split(",")]
    llm = eyas.load(args.target, method="vanilla")
    drafters = {
        f"{name} {shape}": drafter(llm.target, method, tree_of(shape), folder)
        for name, (method, folder) in heads.items()
        for shape in shapes
    }
    prompts = asked(args)
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
        if args.speed:
            record[f"T = {temperature:g}"]["speed"] = speeds(answers, list(heads), shapes, temperature)
    write(args.output, record)


if __name__ == "__main__":
    run(main)
