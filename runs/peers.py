"""eyas beside other engines on the same machine, with the same weights and the same EAGLE-3 head, in alternation.

    make interop; make peers LLAMA_CPP=FOLDER     the engines that are installed; llama.cpp from a build of your own
    python runs/peers.py --target smollm2-q4_1 --output docs/results/peers_smollm2.json --rounds 3
    python runs/peers.py --output FILE.json --rounds 0         only the summary, from the raw rows

Every engine is a process of its own with --threads threads and is ready before anything is measured. All of them answer
the first --prompts bundled prompts of one turn, in another order each time, and read a text of --prompt-tokens tokens.
Greedy, one row; ids are compared with those of eyas' plain decoding. Rounds are added to those that were measured before
with the same settings.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _common import Rows, bundled_prompts, interval, machine, parser, rotated, run, words, write
from _markdown import cell, columns
from _peers import Ask, Engine, Workshop, engines, mean_length
from rich.progress import track

import eyas
from eyas_lab.bench.intervals import ratio, ratio_of_ratios

PLAIN, BEST = "eyas, plain", "eyas, EAGLE-3, 3 drafts"
Figures = dict[str, Any]


def measure(
    entered: Sequence[tuple[Engine, Ask]],
    prompts: Sequence[tuple[str, list[int]]],
    long: list[int],
    rows: Rows,
    args: Any,
) -> None:
    """One more round of everything."""
    number = next_round(rows)
    chance = random.Random(number)
    for name, ids in track(prompts, f"round {number + 1}"):
        for engine, ask in chance.sample(list(entered), len(entered)):
            start = time.perf_counter()
            answer = ask("answer", ids=ids, max_tokens=args.max_new_tokens)
            rows.add(("answer", number, engine.name, name), {**answer, "outside": time.perf_counter() - start})
    for engine, ask in chance.sample(list(entered), len(entered)):
        # a text that was read before may be in a cache
        turned = [rotated(long, 97 * number + 31 * i) for i in range(3)]
        seconds = [ask("answer", ids=ids, max_tokens=1)["first"] for ids in turned]
        rows.add(("prompt", number, engine.name), {"seconds": median(seconds)})
        rows.add(("counts", number, engine.name), {**ask("counts"), "versions": ask("versions")})


def summary(rows: Rows, names: Sequence[str], args: Any) -> Figures:
    """By engine: speeds with intervals over prompts (medians over the rounds), equal ids, prompts."""

    def of(kind: str, name: str) -> list[Figures]:
        return [row for row in rows.of(kind) if row["key"][2] == name]

    plain = {tuple(row["key"][1::2]): row["ids"] for row in of("answer", PLAIN)}
    base = decoding(of("answer", BEST))
    return {
        name: {
            "tokens_per_second": interval(ratio, *decoding(answers)),
            "whole_answers": interval(ratio, *by_prompt(answers, lambda row: (len(row["ids"]), row["seconds"]))),
            "eyas_over_it": interval(ratio_of_ratios, *base, *decoding(answers)) if base[0] and name != BEST else None,
            "ids_equal": [sum(row["ids"] == plain[tuple(row["key"][1::2])] for row in answers), len(answers)],
            "prompt_tokens_per_second": prompt_speed(of("prompt", name), args.prompt_tokens),
            **last_counts(of("counts", name)),
        }
        for name in names
        if (answers := of("answer", name))
    }


def prompt_speed(rows: Sequence[Figures], tokens: int) -> float | None:
    """Tokens of the long prompt per second."""
    return round(tokens / median(row["seconds"] for row in rows), 1) if rows else None


def last_counts(rows: Sequence[Figures]) -> Figures:
    """Return the engine's counts up to its last round, and its versions."""
    if not rows:
        return {"mean_acceptance_length": None, "versions": None}
    return {"mean_acceptance_length": mean_length(rows[-1]), "versions": rows[-1]["versions"]}


def by_prompt(answers: Sequence[Figures], columns: Any) -> list[list[float]]:
    """Two columns by prompt, each the median over the rounds, so that one disturbed round weighs little."""
    values: dict[str, list[tuple[float, float]]] = {}
    for row in answers:
        values.setdefault(row["key"][3], []).append(columns(row))
    return [[median(pair[i] for pair in values[name]) for name in sorted(values)] for i in (0, 1)]


def decoding(answers: Sequence[Figures]) -> list[list[float]]:
    """Tokens behind the first one, and the seconds that they took, by prompt."""
    return by_prompt(answers, lambda row: (len(row["ids"]) - 1, row["seconds"] - row["first"]))


def next_round(rows: Rows) -> int:
    """The number of the first round that is not measured."""
    return 1 + max((row["key"][1] for row in rows.of("answer")), default=-1)


def main() -> None:
    sources, build = (os.environ.get(name) or None for name in ("LLAMA_CPP", "LLAMA_CPP_BUILD"))
    made = parser(
        __doc__,
        target=("embedded", "a model of eyas that has an EAGLE-3 head"),
        rounds=1,
        prompts=12,
        max_new_tokens=64,
        prompt_tokens=512,
        threads=2,
        only=("", "engines whose names hold one of these words, separated by commas"),
    )
    made.add_argument("--llama-cpp", type=Path, default=sources, help="sources of llama.cpp")
    made.add_argument("--llama-build", type=Path, default=build, help="default: build in --llama-cpp")
    args = made.parse_args()
    build = args.llama_build or (args.llama_cpp and args.llama_cpp / "build")
    folder = Path("out/peers") if args.target == "embedded" else Path("out/peers") / args.target
    workshop = Workshop(folder, args.threads, args.llama_cpp, build, args.target)
    workshop.folder.mkdir(parents=True, exist_ok=True)
    before, known = machine(), engines(workshop)
    chosen = [one for one in known if not args.only or any(word in one.name for word in words(args.only))]
    llm = eyas.load(args.target, method="vanilla", kernels="off")
    prompts = [(prompt.id, list(llm.ids(prompt.turns[0]))) for prompt in bundled_prompts(args.prompts)]
    long = ([token for _, ids in prompts for token in ids] * args.prompt_tokens)[: args.prompt_tokens]
    settings = {name: getattr(args, name) for name in ("prompts", "max_new_tokens", "prompt_tokens", "threads")}
    settings |= {"target": args.target} if args.target != "embedded" else {}
    rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
    if args.rounds:
        with ExitStack() as stack:
            entered = [(engine, stack.enter_context(engine.start())) for engine in track(chosen, "starting")]
            for _, ask in track(entered, "warming up"):
                for _, ids in prompts[:3]:
                    ask("answer", ids=ids, max_tokens=args.max_new_tokens)
            for _ in range(args.rounds):
                measure(entered, prompts, long, rows, args)
    exact = {engine.name: engine.exact for engine in known}
    figures = summary(rows, list(exact), args)
    record = {"settings": {**settings, "rounds": next_round(rows)}, "left_out": workshop.left_out}
    write(args.output, {**record, "exact": exact, "engines": figures}, before, quiet=True)
    print(table(figures, exact))


def table(figures: Figures, exact: Figures) -> str:
    """The page's table."""
    ordered = sorted(figures, key=lambda name: -figures[name]["tokens_per_second"][0])
    makers = {
        "decoding": lambda row: "{:,.0f} [{:,.0f}, {:,.0f}]".format(*row["tokens_per_second"]),
        "whole answers": lambda row: f"{row['whole_answers'][0]:,.0f}",
        "prompts": lambda row: f"{row['prompt_tokens_per_second']:,.0f}" if row["prompt_tokens_per_second"] else "",
        "mean length": lambda row: cell(row["mean_acceptance_length"]),
        "ids equal": lambda row: "{} of {}".format(*row["ids_equal"]) + row["rounded"],
        "eyas EAGLE-3 over it": lambda row: cell(row["eyas_over_it"]),
    }
    return columns({name: {**figures[name], "rounded": "" if exact[name] else ", rounded"} for name in ordered}, makers)


if __name__ == "__main__":
    run(main)
