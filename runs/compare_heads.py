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
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from _common import (
    RESAMPLES,
    Answers,
    ask,
    bundled_prompts,
    chat_prompts,
    drafter,
    open_text,
    parser,
    rounded,
    run,
    tree_of,
    write,
)  # fmt: skip

import eyas
from eyas.errors import InputError
from eyas_lab.bench.rows import speedup
from eyas_lab.bench.run import VANILLA
from eyas_lab.bench.tasks import Prompt
from eyas_lab.metrics import Cycle

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


def speeds(answers: Answers, names: list[str], shape: str, temperature: float) -> dict[str, Any]:
    """Whole answers' tokens/s with every head, over plain decoding's and over other heads'; the
    median time of a cycle and of its draft."""
    plain = answers.of(VANILLA, temperature)
    by_head = {name: answers.of(f"{name} {shape}", temperature) for name in names}
    cycles = {name: [cycle for answer in ours for cycle in answer.cycles] for name, ours in by_head.items()}

    def over(ours: Answers, baseline: Answers) -> list[float | None]:
        return rounded(speedup(ours, baseline, whole=True, resamples=RESAMPLES))

    def median_ms(seconds: Callable[[Cycle], float | None]) -> dict[str, float]:
        times = {name: [t for cycle in those if (t := seconds(cycle)) is not None] for name, those in cycles.items()}
        return {name: round(1e3 * median(values), 3) for name, values in times.items()}

    return {
        "tokens_per_second": {
            name: round(ours.tokens / sum(a.seconds for a in ours), 1) for name, ours in by_head.items()
        },
        "median_cycle_ms": median_ms(lambda cycle: cycle.seconds),
        "median_draft_ms": median_ms(lambda cycle: cycle.draft),
        "over_plain": {name: over(ours, plain) for name, ours in by_head.items()},
        "ratio": {f"{b} / {a}": over(by_head[b], by_head[a]) for a, b in combinations(names, 2)},
    }


def compared(answers: Answers, names: list[str], shape: str, temperature: float) -> dict[str, Any]:
    """tau of every head; its difference and its ratio to those of the heads before it."""
    by_head = {name: answers.of(f"{name} {shape}", temperature) for name in names}
    pairs = [(f"{b} {{}} {a}", by_head[b], by_head[a]) for a, b in combinations(names, 2)]
    return {
        "tau": {name: ours.tau() for name, ours in by_head.items()},
        "difference": {pair.format("-"): b.tau_difference(a) for pair, b, a in pairs},
        "ratio": {pair.format("/"): b.tau_over(a) for pair, b, a in pairs},
    }


def main() -> None:
    made = parser(
        __doc__,
        target=None,
        limit=300,
        skip=0,
        max_new_tokens=96,
        temperatures="0,1",
        trees=TREES,
        speed=(False, "also tokens per second; all prompts, those that loop too"),
    )
    made.add_argument("--head", action="append", default=[], metavar="NAME=METHOD:DIR", help="a head to compare")
    made.add_argument("--chats", type=Path, metavar="FILE", help="chats, JSONL; .gz too (default: the bundled prompts)")
    made.add_argument("--trained-on", type=Path, metavar="FILE", help="chats that are left out of --chats")
    args = made.parse_args()
    heads, shapes = read_heads(args.head), args.trees.split(",")
    temperatures = [float(part) for part in args.temperatures.split(",")]
    llm = eyas.load(args.target, method="vanilla")
    drafters = {
        f"{name} {shape}": drafter(llm.target, method, tree_of(shape), folder)
        for name, (method, folder) in heads.items()
        for shape in shapes
    }
    prompts, names = asked(args), list(heads)
    answers = ask(llm, drafters, prompts, args.output, temperatures=temperatures, max_new_tokens=args.max_new_tokens)
    looping = Answers(a for a in answers if a.temperature == 0).loops()
    sound = answers.without(looping)
    record: dict[str, Any] = {"prompts": len(prompts), "loops": len(looping)}
    record["heads"] = {name: {"method": method, "trained": trained(folder)} for name, (method, folder) in heads.items()}
    for temperature in temperatures:
        plain = sound.of(VANILLA, temperature)
        equal = {name: f"{sound.equal_texts(name, temperature)} of {len(plain)}" for name in drafters}
        entry = {"tokens": plain.tokens, "equal_to_vanilla": equal}
        entry |= {shape: compared(sound, names, shape, temperature) for shape in shapes}
        if args.speed:
            entry["speed"] = {shape: speeds(answers, names, shape, temperature) for shape in shapes}
        record[f"T = {temperature:g}"] = entry
    write(args.output, record)


if __name__ == "__main__":
    run(main)
