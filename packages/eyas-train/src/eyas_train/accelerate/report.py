"""The report of a finished run: the measurements after training, for machines and for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.files import write_text
from eyas.hardware import cpu_name, versions
from eyas_train.accelerate.journal import Journal
from eyas_train.accelerate.prospect import Prospect

__all__ = ["HEADING", "made_report", "markdown", "write_report"]

HEADING = "## Speed where it was trained"


def made_report(prospect: Prospect, journal: Journal, summary: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the report of a finished run.

    Args:
        summary: of the bench.
        command: the command line.
    """
    plan, taken = prospect.plan, journal["steps"]
    planned = {
        "measure": taken["measure"]["seconds"],
        "regenerate": plan.answer_seconds,
        "features": plan.feature_seconds,
        "train": plan.training_seconds,
        "bench": plan.bench_seconds,
    }
    return {
        "command": command,
        "target": prospect.target,
        "method": prospect.method,
        "machine": cpu_name(),
        "versions": versions(),
        "speeds": asdict(prospect.speeds),
        "steps": [{"name": n, "planned": round(s, 1), "seconds": taken[n]["seconds"]} for n, s in planned.items()],
        "trained_tokens": journal["training"]["tokens"],
        "reached": _figures_of(summary, prospect.method),
        "warnings": list(summary.get("warnings") or ()),
    }


def _figures_of(summary: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the figures of this method and plain decoding."""
    rows = {row["method"]: row for row in summary["rows"] if row["task"] == "all"}
    row, plain = rows[method], rows["vanilla"]
    names = ("speedup", "speedup_low", "speedup_high", "tau", "c", "tokens_per_second", "prompts", "equal")
    return {**{name: row.get(name) for name in names}, "plain_tokens_per_second": plain["tokens_per_second"]}


def write_report(folder: Path, report: Mapping[str, Any]) -> str:
    """Write report.json and report.md, and the section of the card; return the Markdown."""
    text = markdown(report)
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", text)
    card = folder / "README.md"
    before, *_ = card.read_text(encoding="utf-8").partition(f"\n{HEADING}")
    write_text(card, f"{before.rstrip()}\n\n{HEADING}\n\n{_figures(report)}\n")
    return text


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page."""
    rows = "\n".join(
        f"| {step['name']} | {step['planned'] / 60:.1f} | {step['seconds'] / 60:.1f} |" for step in report["steps"]
    )
    return f"""# {report["target"]} with {report["method"]}

{_figures(report)}

| step | minutes planned | minutes taken |
|---|---|---|
{rows}

`{report["command"]}`; eyas {report["versions"]["eyas"]}, torch {report["versions"]["torch"]}.
"""


def _figures(report: Mapping[str, Any]) -> str:
    """Return the table of the measurements, with the machine."""
    found = report["reached"]
    lines = [
        "| | speed-up over plain decoding | tokens per pass (tau) | cost of a pass (c) |",
        "|---|---|---|---|",
        f"| **measured after training** | **{found['speedup']:.2f}** [{found['speedup_low']:.2f}, {found['speedup_high']:.2f}] "
        f"| {found['tau']:.2f} | {found['c']:.2f} |",
    ]
    speed = (
        f"{found['tokens_per_second']:,.1f} tokens/s instead of {found['plain_tokens_per_second']:,.1f}, greedy, on "
        f"{found['prompts']} questions that were kept apart; {report['machine']}."
    )
    doubts = "".join(f" **Measure again**: {warning}." for warning in report.get("warnings", ()))
    texts = {True: "All texts equal plain decoding's.", False: "**Some texts differ from plain decoding's.**"}
    advice = "" if found["speedup"] > 1.02 else "The head did not make this model faster here. "
    if advice and not doubts:
        advice += "More --minutes, and --data like what you will ask, make a better one. "
    return "\n".join([*lines, "", f"{advice}{speed} {texts.get(found['equal'], '')}{doubts}".rstrip()])
