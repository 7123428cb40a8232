"""The end of a bench: everything in one object, and the files that are made from it.

FOLDER/summary.json and report.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.files import write_text
from eyas.hardware.machine import Snapshot, Used, busy
from eyas.passes import verify_cost
from eyas_lab.bench import cost, report, rows
from eyas_lab.bench.card import card
from eyas_lab.bench.record import FORMAT, Answer
from eyas_lab.bench.run import Bench

__all__ = ["summarise", "write", "wrong_texts"]

NEAR_TIE = 1e-5  # distance of two logits in float32: below it, either token is plain decoding's
NEAR_TIE_OF_KERNELS = 2e-4  # where kernels run the target: transformers' own forward rounds otherwise
LEAST_CYCLE = 0.95  # of a cycle in plain steps; noise of a quiet machine is 5 %


def summarise(
    bench: Bench,
    answers: Sequence[Answer],
    before: Snapshot,
    command: str,
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the summary. Measurements other than the answers are made here: bandwidth, and a
    pass's time against its nodes.

    Args:
        before: the snapshot of this run's beginning.
        skipped: contestants that cannot take part -> the reason.

    Where acceptance is simulated, title and warnings say so.
    """
    target, settings = bench.llm.target, bench.settings()
    bandwidth, weights = cost.bandwidth(target.device), cost.bytes_per_step(target)
    table = rows.rows(answers, weights, bandwidth)
    return {
        "format": FORMAT,
        "title": _title(bench, settings),
        "command": command,
        "warnings": [*_warnings(bench, answers, settings["threads"]), *slow_baseline(table)],
        "machine": card(before, dtype=settings["dtype"], device=settings["device"]),
        "rows": table,
        "failed": dict(bench.failed),
        "verify_cost": verify_cost(target),
        "bytes_per_step": weights,
        "bandwidth": None if bandwidth is None else round(bandwidth),
        "peak_memory_bytes": max((a.memory.peak for a in answers if a.memory), default=None),
        "skipped": dict(skipped or {}),
        "minutes": round(sum(a.seconds for a in answers) / 60, 2),
        "settings": settings,
    }


def _title(bench: Bench, settings: Mapping[str, Any]) -> str:
    forms = ("weights", "activations", "kv", "draft_weights")
    kept = ("exact", "auto")  # auto: the drafts' default
    rounded = [f"{form.replace('_', ' ')} rounded to {settings[form]}" for form in forms if settings[form] not in kept]
    how = ", ".join((settings["runs_by"], *rounded))
    title = f"eyas bench: {bench.llm.target.name}, {settings['dtype']}, {settings['device']}, by {how}"
    return title + (" (SIMULATED acceptance)" if bench.simulated else "")


def _warnings(bench: Bench, answers: Sequence[Answer], threads: int) -> list[str]:
    given = f"Acceptance is simulated ({bench.simulated}): tau was given, texts mean nothing; times are measured."
    return [line for line in (given if bench.simulated else None, busy(_others(answers), threads)) if line]


def slow_baseline(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning where cycles took less time than plain steps: each cycle contains a whole pass, so something
    slowed plain decoding, and the speed-ups are too high. Rows of less than a second are left out."""
    timed = (row for row in table if row["c"] is not None and row["tokens"] > row["tokens_per_second"])
    wrong = ", ".join(f"{row['method']} on {row['task']} ({row['c']:.2f})" for row in timed if row["c"] < LEAST_CYCLE)
    told = f"cycles cost less than a plain step, so plain decoding was disturbed: {wrong}; measure again"
    return [told] if wrong else []


def _others(answers: Sequence[Answer]) -> Used:
    """CPU use while the prompts were asked, in this run and in those before it that were
    interrupted."""
    each = {(a.temperature, a.prompt): a.around for a in answers if a.around is not None}.values()
    known = all(used.others is not None for used in each)
    return Used(sum(used.seconds for used in each), sum(used.others or 0.0 for used in each) if known else None)


def write(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write both files, each whole or not at all."""
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(folder / "report.md", report.markdown(summary))


def wrong_texts(summary: Mapping[str, Any]) -> list[str]:
    """Texts in float32 that are not plain decoding's, apart from near ties. Of transformers' only
    plain ones count."""
    if summary["settings"]["dtype"] != "float32":
        return []
    by_kernels = summary["settings"].get("runs_by") == "kernels"
    lines = []
    for row in summary["rows"]:
        if row["task"] != "all" or row["method"].startswith("transformers_"):
            continue
        near_tie = NEAR_TIE_OF_KERNELS if by_kernels and row["method"] == "transformers" else NEAR_TIE
        for prompt, turn, token, margin in row["differ"]:
            if margin is None or margin > near_tie:
                place = f"{row['method']}, {prompt}, turn {turn + 1}, T = {row['temperature']:g}: token {token}"
                size = "none" if margin is None else f"{margin:.2g}"
                lines.append(f"{place} is not plain decoding's (margin {size}): a fault of eyas")
    return lines
