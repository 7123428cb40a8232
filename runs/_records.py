"""The records in docs/results/ that pages and pictures are made from, and figures of several of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from _markdown import Interval

from eyas_lab.bench.intervals import bootstrap, ratio_of_ratios

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = DOCS / "results"
Record = dict[str, Any]

PLAIN, OWN, GENERATE = "plain", "plain, model's own forward", "transformers generate"


@cache
def record(name: str) -> Record:
    """A record of docs/results/ by its name."""
    content: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def pooled_rows(name: str) -> dict[str, Record]:
    """The rows of a bench over all tasks, by method."""
    return {row["method"]: row for row in record(name)["rows"] if row["task"] == "all"}


def best_tree(name: str) -> Record:
    """The row of the fastest fixed tree in a speed record."""
    trees = (row for contestant, row in record(name)["table"].items() if contestant[-1].isdigit())
    return max(trees, key=lambda row: row["over_plain"][0])


def auto_over_best(name: str, method: str) -> Interval | None:
    """Speed of `--tree auto` over the best fixed tree, which is chosen on one half of the prompts
    and judged on the other; None if the method was not measured."""
    rows, auto = record(name)["rows"], f"{method} auto"
    if auto not in rows[0]:
        return None
    fixed = [contestant for contestant in rows[0] if contestant.startswith(f"{method} ") and contestant != auto]
    sums: dict[str, list[float]] = {}
    for half in (0, 1):
        chosen = max(fixed, key=lambda tree: speed_of(rows[half::2], tree))
        for row in rows[1 - half :: 2]:
            before = sums.setdefault(row["prompt"], [0.0] * 4)
            counts = [row[contestant][key] for contestant in (auto, chosen) for key in ("tokens", "seconds")]
            sums[row["prompt"]] = [a + b for a, b in zip(before, counts, strict=True)]
    return bootstrap(ratio_of_ratios, *zip(*sums.values(), strict=True), resamples=4000)


def speed_of(rows: list[Record], contestant: str) -> float:
    """Tokens per second of a contestant over these prompts."""
    return float(sum(r[contestant]["tokens"] for r in rows) / sum(r[contestant]["seconds"] for r in rows))
