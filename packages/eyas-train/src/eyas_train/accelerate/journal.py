"""The plan and the finished steps of a run, in a file that is written after every step. So the same command
goes on where it ended. And the report of a finished run: the measurements after training, for machines and for people.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas.errors import InputError, OptionError
from eyas.files import write_text
from eyas.hardware import cpu_name, versions
from eyas_lab.folders import read_versioned
from eyas_train.accelerate.plan import Prospect

FILE = "run.json"
HEADING = "## Speed where it was trained"
FORMAT, VERSION = "eyas-accelerate", 2


class Journal:
    """The journal of a folder; empty when the folder is new.

    Args:
        settings: settings that must be equal for a run to go on.

    Raises:
        OptionError: the folder holds a run with other settings.
        InputError: the file is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        now = json.loads(json.dumps(settings))
        self.content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "settings": now, "steps": {}}
        if not self.path.exists():
            return
        self.content = read_versioned(self.path, FORMAT, VERSION, self._checked, "", self._damage_error)
        there = self.content["settings"]
        if other := [
            f"{name} {there.get(name)} there, {now[name]} now" for name in now if there.get(name) != now[name]
        ]:
            raise OptionError(
                f"{folder.parent} holds a run with other settings: {'; '.join(other)}; "
                "repeat the old ones, or use another --output"
            )

    def _damage_error(self, reason: str) -> InputError:
        return InputError(f"{self.path} is damaged ({reason}): delete it, and the run begins again")

    def _checked(self, fields: dict[str, Any]) -> dict[str, Any]:
        if fields["version"] < VERSION or not {"settings", "steps"} <= fields.keys():
            raise LookupError
        return fields

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def write(self, **values: Any) -> None:
        """Keep these values."""
        self.content |= values
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")

    def is_done(self, step: str) -> bool:
        """Return whether a step is finished."""
        return bool(self.content["steps"].get(step, {}).get("done"))

    def seconds(self, *steps: str) -> float:
        """Return the seconds that these steps have taken so far; without names, all of them."""
        taken = self.content["steps"]
        return float(sum(taken[name]["seconds"] for name in steps or taken if name in taken))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, and keep that it is done; the time of one that is interrupted is kept too."""
        before, began, done = self.seconds(name), time.monotonic(), False
        try:
            yield
            done = True
        finally:
            seconds = round(before + time.monotonic() - began, 1)
            self.write(steps={**self.content["steps"], name: {"seconds": seconds, "done": done}})


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
    rows = {row["method"]: row for row in summary["rows"] if row["task"] == "all"}
    names = ("speedup", "speedup_low", "speedup_high", "tau", "c", "tokens_per_second", "prompts", "equal")
    reached = {name: rows[prospect.method].get(name) for name in names}
    return {
        "command": command,
        "target": prospect.target,
        "method": prospect.method,
        "machine": cpu_name(),
        "versions": versions(),
        "speeds": asdict(prospect.speeds),
        "steps": [{"name": n, "planned": round(s, 1), "seconds": taken[n]["seconds"]} for n, s in planned.items()],
        "trained_tokens": journal["training"]["tokens"],
        "reached": {**reached, "plain_tokens_per_second": rows["vanilla"]["tokens_per_second"]},
        "warnings": list(summary.get("warnings") or ()),
    }


def write_report(folder: Path, report: Mapping[str, Any]) -> str:
    """Write report.json and report.md, and the section of the card; return the Markdown."""
    steps = [f"| {s['name']} | {s['planned'] / 60:.1f} | {s['seconds'] / 60:.1f} |" for s in report["steps"]]
    used, figures = report["versions"], _figures(report)
    text = "\n".join([
        f"# {report['target']} with {report['method']}\n", figures,
        "\n| step | minutes planned | minutes taken |\n|---|---|---|", *steps,
        f"\n`{report['command']}`; eyas {used['eyas']}, torch {used['torch']}.\n",
    ])  # fmt: skip
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", text)
    card = folder / "README.md"
    before, *_ = card.read_text(encoding="utf-8").partition(f"\n{HEADING}")
    write_text(card, f"{before.rstrip()}\n\n{HEADING}\n\n{figures}\n")
    return text


def _figures(report: Mapping[str, Any]) -> str:
    """Return the table of the measurements, with the machine."""
    found = report["reached"]
    table = (
        "| | speed-up over plain decoding | tokens per pass (tau) | cost of a pass (c) |\n|---|---|---|---|\n"
        f"| **measured after training** | **{found['speedup']:.2f}** [{found['speedup_low']:.2f}, {found['speedup_high']:.2f}] "
        f"| {found['tau']:.2f} | {found['c']:.2f} |\n"
    )
    speed = (
        f"{found['tokens_per_second']:,.1f} tokens/s instead of {found['plain_tokens_per_second']:,.1f}, greedy, on "
        f"{found['prompts']} questions that were kept apart; {report['machine']}."
    )
    doubts = "".join(f" **Measure again**: {warning}." for warning in report.get("warnings", ()))
    texts = {True: "All texts equal plain decoding's.", False: "**Some texts differ from plain decoding's.**"}
    advice = "" if found["speedup"] > 1.02 else "The head did not make this model faster here. "
    if advice and not doubts:
        advice += "More --minutes, and --data like what you will ask, make a better one. "
    return f"{table}\n{advice}{speed} {texts.get(found['equal'], '')}{doubts}".rstrip()
