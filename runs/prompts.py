"""Measure how a long prompt delays the rows that run, and how much a predicted text saves.

    python runs/prompts.py [--rounds 5] [--busy]

stall        three rows decode while a prompt of --tokens tokens arrives: time between two cycles of theirs, and until the prompt's first
             token, by prefill budget. Budgets take turns, round by round; printed are the medians of the rounds
--busy       on a machine that others use too: one thread, and the seconds that it computed instead of those of the clock
prediction   answers of the model, given as predictions with some of their words changed: tokens per second, with and without
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from _common import parser
from _markdown import table

import eyas
from eyas.core.dormant import with_policy
from eyas.core.engine import Decoder, Request
from eyas.core.prompts import Budget

# 0: no prompt arrives; None: prompts are read whole
BUDGETS: tuple[Budget, ...] = (0, "auto", 16, 32, 64, 128, 256, None)
# shares of words that are others in the prediction; None: no prediction
CHANGES = (None, 0.0, 0.02, 0.05, 0.1, 0.3, 1.0)
CYCLES = 50  # at least; the prompt's last chunk is among them
PROMPTS = (
    "Write a Python function that adds two numbers.",
    "Write a Java class for a bank account.",
    "Write a C program that sorts numbers.",
)


def stall(
    llm: eyas.LLM, tokens: int, budget: Budget, draft: str | int, clock: Callable[[], float]
) -> tuple[float, float, float, float]:
    """Milliseconds between cycles of the running rows: median, 99th percentile, longest; and until
    the prompt's first token."""
    dice = random.Random(7)
    decoder = Decoder(llm.target, with_policy(llm.drafter, llm.policy), rows=4, prefill_budget=budget or None)
    for _ in range(3):
        decoder.add(Request(tuple(dice.randrange(300, 4000) for _ in range(40)), 2000, draft=draft))
    ended, first = list[float](), 0.0
    for _ in range(5):
        decoder.step()
    began = clock()
    ticket = (
        decoder.add(Request(tuple(dice.randrange(300, 4000) for _ in range(tokens)), 60, draft=draft))
        if budget != 0
        else 0
    )
    while len(ended) < CYCLES or (ticket and not first and len(ended) < 10 * CYCLES):
        for step in decoder.step():
            if step.request == ticket and step.prefill:
                first = clock() - began
            elif step.request == 1:
                ended.append(clock())
    gaps = sorted(later - earlier for earlier, later in pairwise([began, *ended]))
    return tuple(1e3 * x for x in (statistics.median(gaps), gaps[-2], gaps[-1], first))  # type: ignore[return-value]


def speed(llm: eyas.LLM, prompt: str, change: float | None, clock: Callable[[], float]) -> tuple[int, float, int]:
    """Tokens of the answer, seconds, tokens that came from the prediction."""
    answer, dice = llm.generate(prompt, max_new_tokens=256), random.Random(3)
    words = ["blue" if dice.random() < (change or 0) else word for word in answer.text.split(" ")]
    prediction = None if change is None else " ".join(words)
    began = clock()
    result = llm.generate(prompt, max_new_tokens=256, prediction=prediction)
    seconds = clock() - began
    if result.token_ids != answer.token_ids:
        raise SystemExit("the prediction has changed the answer")
    return result.stats.tokens, seconds, result.stats.predicted_tokens


def main() -> None:
    args = parser(
        __doc__,
        output=None,
        tokens=3400,
        rounds=5,
        draft=("off", "of the rows: off, auto, or a number of draft tokens"),
        busy=False,
    ).parse_args()
    clock = time.process_time if args.busy else time.perf_counter
    if args.busy:
        torch.set_num_threads(1)
    llm = eyas.load(tree="fixed")
    draft = int(args.draft) if args.draft.isdecimal() else args.draft
    stall(llm, 600, None, draft, clock)  # warm-up
    stalls = [[stall(llm, args.tokens, budget, draft, clock) for budget in BUDGETS] for _ in range(args.rounds)]
    print(f"a prompt of {args.tokens} tokens, draft {draft}\n")
    lines = []
    for budget, figures in zip(BUDGETS, zip(*stalls, strict=True), strict=True):
        name = {0: "no prompt arrives", None: "whole"}.get(budget, str(budget))
        lines.append([name, *(f"{statistics.median(column):.1f}" for column in zip(*figures, strict=True))])
    heads = ("budget", "ms between cycles: median", "99th percentile", "longest", "ms to the first token")
    print(table(heads, lines) + "\n")
    speeds = [
        [[speed(llm, prompt, change, clock) for prompt in PROMPTS] for change in CHANGES] for _ in range(args.rounds)
    ]
    lines = []
    for change, figures in zip(CHANGES, zip(*speeds, strict=True), strict=True):
        rate = statistics.median(sum(n for n, _, _ in one) / sum(seconds for _, seconds, _ in one) for one in figures)
        share = sum(predicted for *_, predicted in figures[0]) / sum(n for n, *_ in figures[0])
        lines.append(["no prediction" if change is None else f"{change:.0%}", f"{rate:.0f}", f"{share:.0%}"])
    print(table(("words changed", "tokens per second", "of the prediction"), lines))


if __name__ == "__main__":
    main()
