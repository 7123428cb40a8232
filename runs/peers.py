"""eyas beside other engines on the same machine, with the same weights and the same EAGLE-3 head,
in alternation.

    make interop; make peers LLAMA_CPP=FOLDER     the engines that are installed; llama.cpp from a build of your own
    python runs/peers.py --output docs/results/peers.json --rounds 3
    python runs/peers.py --output FILE.json --prepare          only converts the model for all engines (minutes; kept in out/peers)
    python runs/peers.py --output docs/results/peers.json --rounds 0     only the summary and the picture, from the raw rows

Every engine is a process of its own with --threads threads and is ready before anything is
measured; each prompt is answered by all of them, another one first each time. Greedy, one row. A
round measures

answers    the first --prompts bundled prompts of one turn, at most --max-new-tokens tokens: seconds to the first token and to the last
prompts    a text of --prompt-tokens tokens, to the first token
passes     seconds of a pass over 1 to 32 tokens behind 256, where an engine can tell

The ids are compared with those of eyas' plain decoding. Rounds are added to those that were
measured before with the same settings.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _common import Rows, bundled_prompts, interval, machine, parser, run, write
from _peers import Ask, Engine, Workshop, engines, mean_length
from _peers_picture import draw
from rich.progress import track

import eyas
from eyas.metrics import ratio, ratio_of_ratios

PLAIN, BEST = "eyas, plain", "eyas, EAGLE-3, 3 drafts"
PASSES = (1, 2, 4, 8, 16, 32)
CONTEXT = 256
REPEATS = 5
Figures = dict[str, Any]


def measure(
    entered: Sequence[tuple[Engine, Ask]],
    prompts: Sequence[tuple[str, list[int]]],
    long: list[int],
    rows: Rows,
    args: Any,
) -> None:
    """One more round of everything."""
    number = 1 + max((row["key"][1] for row in rows.of("answer")), default=-1)
    chance = random.Random(number)
    for name, ids in track(prompts, f"round {number + 1}"):
        for engine, ask in chance.sample(list(entered), len(entered)):
            start = time.perf_counter()
            found = ask("answer", ids=ids, max_tokens=args.max_new_tokens)
            rows.add(("answer", number, engine.name, name), {**found, "outside": time.perf_counter() - start})
    for engine, ask in chance.sample(list(entered), len(entered)):
        # a text that was read before may be in a cache
        turned = [rotated(long, 97 * number + 31 * i) for i in range(3)]
        seconds = [ask("answer", ids=ids, max_tokens=1)["first"] for ids in turned]
        rows.add(("prompt", number, engine.name), {"seconds": median(seconds)})
        if engine.passes:
            rows.add(
                ("passes", number, engine.name), ask("passes", tokens=list(PASSES), context=CONTEXT, repeats=REPEATS)
            )
        rows.add(("counts", number, engine.name), {**ask("counts"), "versions": ask("versions")})


def rotated(ids: list[int], by: int) -> list[int]:
    """The ids, another one first."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def summary(rows: Rows, names: Sequence[str], args: Any) -> Figures:
    """By engine: speeds with intervals over prompts (medians over the rounds), equal ids, prompts,
    passes."""
    answers = {name: [row for row in rows.of("answer") if row["key"][2] == name] for name in names}
    plain = {(row["key"][1], row["key"][3]): row["ids"] for row in answers.get(PLAIN, [])}
    base = decoding(answers.get(BEST, []))
    found = {}
    for name, given in answers.items():
        if not given:
            continue
        own = decoding(given)
        passes = [row["seconds"] for row in rows.of("passes") if row["key"][2] == name]
        prompt = [row["seconds"] for row in rows.of("prompt") if row["key"][2] == name]
        counts = [row for row in rows.of("counts") if row["key"][2] == name]
        found[name] = {
            "tokens_per_second": interval(ratio, *own),
            "whole_answers": interval(ratio, *by_prompt(given, lambda row: (len(row["ids"]), row["seconds"]))),
            "eyas_over_it": interval(ratio_of_ratios, *base, *own) if base and name != BEST else None,
            "ids_equal": [sum(row["ids"] == plain[row["key"][1], row["key"][3]] for row in given), len(given)],
            "prompt_tokens_per_second": round(args.prompt_tokens / median(prompt), 1) if prompt else None,
            "pass_ms": {str(n): round(1000 * median(times), 3) for n, *times in zip(PASSES, *passes, strict=True)}
            if passes
            else None,
            "mean_acceptance_length": mean_length(counts[-1]) if counts else None,
            "versions": counts[-1]["versions"] if counts else None,
        }
    return found


def by_prompt(given: Sequence[Figures], columns: Any) -> list[list[float]]:
    """Two columns by prompt, each the median over the rounds, so that one disturbed round weighs
    little."""
    values: dict[str, list[tuple[float, float]]] = {}
    for row in given:
        values.setdefault(row["key"][3], []).append(columns(row))
    return [[median(pair[i] for pair in values[name]) for name in sorted(values)] for i in (0, 1)]


def decoding(given: Sequence[Figures]) -> list[list[float]]:
    """Tokens behind the first one, and the seconds that they took, by prompt."""
    return by_prompt(given, lambda row: (len(row["ids"]) - 1, row["seconds"] - row["first"]))


def main() -> None:
    made = parser(__doc__, rounds=1, prompts=12, max_new_tokens=64, prompt_tokens=512, threads=2)
    made.add_argument(
        "--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP") or None, help="sources of llama.cpp"
    )
    made.add_argument(
        "--llama-build",
        type=Path,
        default=os.environ.get("LLAMA_CPP_BUILD") or None,
        help="default: build in --llama-cpp",
    )
    made.add_argument("--only", default="", help="engines whose names hold one of these words, separated by commas")
    made.add_argument(
        "--prepare", action="store_true", help="convert the model, start every engine once, measure nothing"
    )
    args = made.parse_args()
    sources = None if args.llama_cpp is None else Path(args.llama_cpp)
    build = args.llama_build or (sources / "build" if sources else None)
    workshop = Workshop(Path("out/peers"), args.threads, sources, None if build is None else Path(build))
    workshop.folder.mkdir(parents=True, exist_ok=True)
    before, known = machine(), engines(workshop)
    words = [word.strip() for word in args.only.split(",") if word.strip()]
    chosen = [engine for engine in known if not words or any(word in engine.name for word in words)]
    llm = eyas.load(method="vanilla", kernels="off")
    prompts = [(prompt.id, list(llm.ids(prompt.turns[0]))) for prompt in bundled_prompts(args.prompts)]
    long = ([token for _, ids in prompts for token in ids] * args.prompt_tokens)[: args.prompt_tokens]
    settings = {name: getattr(args, name) for name in ("prompts", "max_new_tokens", "prompt_tokens", "threads")}
    if args.rounds or args.prepare:
        rows = None if args.prepare else Rows(args.output.with_suffix(".raw.jsonl"), settings)
        with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
            asks = pool.map(lambda engine: stack.enter_context(engine.start()), chosen)
            entered = list(zip(chosen, track(asks, "starting", total=len(chosen)), strict=True))
            for _, ask in track(entered, "warming up"):
                for _, ids in prompts[:3]:
                    ask("answer", ids=ids, max_tokens=args.max_new_tokens)
            if rows is not None:
                for _ in range(args.rounds):
                    measure(entered, prompts, long, rows, args)
    if not args.prepare:
        rows = Rows(args.output.with_suffix(".raw.jsonl"), settings)
        exact = {engine.name: engine.exact for engine in known}
        found = summary(rows, list(exact), args)
        rounds = 1 + max((row["key"][1] for row in rows.of("answer")), default=-1)
        record = {
            "settings": {**settings, "rounds": rounds},
            "left_out": workshop.left_out,
            "exact": exact,
            "engines": found,
        }
        write(args.output, record, before, quiet=True)
        draw(found, exact, args.output.with_suffix(".svg"))
        print(table(found, exact))


def table(found: Figures, exact: Figures) -> str:
    """The page's table."""
    head = "| | decoding | whole answers | prompts | mean length | ids equal | eyas EAGLE-3 over it |\n|---|---|---|---|---|---|---|"
    lines = []
    for name, row in sorted(found.items(), key=lambda item: -item[1]["tokens_per_second"][0]):
        over = row["eyas_over_it"]
        cells = [
            name,
            "{:,.0f} [{:,.0f}, {:,.0f}]".format(*row["tokens_per_second"]),
            f"{row['whole_answers'][0]:,.0f}",
            f"{row['prompt_tokens_per_second']:,.0f}" if row["prompt_tokens_per_second"] else "",
            f"{row['mean_acceptance_length']:.2f}" if row["mean_acceptance_length"] else "",
            "{} of {}".format(*row["ids_equal"]) + ("" if exact[name] else ", rounded"),
            "{:.2f} [{:.2f}, {:.2f}]".format(*over) if over else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([head, *lines])


if __name__ == "__main__":
    run(main)
