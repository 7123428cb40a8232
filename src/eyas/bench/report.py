"""From answers to what people read: the summary (JSON), a Markdown table, and one HTML page that needs nothing beside it.

A summary carries its format's number; another one is refused. This module runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from eyas.bench.metrics import ALL
from eyas.bench.record import FORMAT
from eyas.errors import InputError

__all__ = ["comparison", "markdown", "page", "read_summary"]

Summary = Mapping[str, Any]


def read_summary(path: Path) -> dict[str, Any]:
    """InputError when it is no summary of this format."""
    place = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(place.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{place} cannot be read as a summary of `eyas bench`: {error}") from error
    if not isinstance(found, dict) or "rows" not in found:
        raise InputError(f"{place} is no summary of `eyas bench`: name a folder or its summary.json")
    if found.get("format") != FORMAT:
        raise InputError(f"{place} has format {found.get('format')}, this eyas reads {FORMAT}: run the bench again")
    return found


def number(value: float | None, digits: int = 2, low_high: Sequence[float | None] | None = None) -> str:
    """`2.31 [2.20, 2.42]`; a dash where there is none."""
    if value is None:
        return "–"
    if not low_high or low_high[0] is None or low_high[1] is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


HEADS = ("method", "tok/s", "speed-up", "vs HF", "tau", "c", "1st ms", "texts")  # HF: transformers' generate


def cells(row: Mapping[str, Any], intervals: bool = True) -> tuple[str, ...]:
    """A row of the summary, for people."""
    equal = {True: "equal", None: "not compared", False: f"{len(row['differ'])} differ"}[row["equal"]]
    tau = (row["tau_interval"] or (None, None, None))[1:] if intervals else None
    speedup = (row["speedup_low"], row["speedup_high"])  # a ratio of times is never shown without its interval
    return (
        row["method"], number(row["tokens_per_second"], 1), number(row["speedup"], 2, speedup),
        number(row["speedup_vs_transformers"]), number(row["tau"], 2, tau), number(row["c"]), number(row["first_token_ms"], 1), equal,
    )  # fmt: skip


def sections(summary: Summary) -> list[tuple[float, str, list[Mapping[str, Any]]]]:
    """(temperature, task, rows); pooled tasks first, and alone where there is but one task."""
    tasks = {row["task"] for row in summary["rows"]} - {ALL}
    keys = list(dict.fromkeys((row["temperature"], row["task"]) for row in summary["rows"] if row["task"] == ALL or len(tasks) > 1))
    keys.sort(key=lambda key: (key[0], key[1] != ALL))
    return [(t, task, [r for r in summary["rows"] if (r["temperature"], r["task"]) == (t, task)]) for t, task in keys]


def markdown(summary: Summary) -> str:
    """The tables, the machine and what must be known to read them."""
    lines = [f"# {summary['title']}", "", f"`{summary['command']}`", "", machine_line(summary["machine"]), ""]
    lines += [f"**{warning}**\n" for warning in summary["warnings"]]
    for temperature, task, rows in sections(summary):
        what = "all tasks" if task == ALL else task
        lines += [f"## T = {temperature:g}, {what} ({rows[0]['prompts']} prompts)", ""]
        lines += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows] + [""]
    lines += [f"Not run: {name}: {why}" for name, why in summary["skipped"].items()]
    return "\n".join([*lines, "", NOTES, ""])


NOTES = (
    "Speed-up: decoded tokens per second over vanilla's, on the same prompts, the prompt's own pass apart; vs HF: the same over "
    "transformers' generate. 1st ms: until the first token. tau: tokens per cycle. c: time of a cycle over a vanilla step. "
    "Brackets: 95 %, bootstrap over prompts, paired."
)


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine card in one line."""

    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
        return ", ".join(map(shown, value)) if isinstance(value, list) else str(value)

    return "; ".join(f"{name.replace('_', ' ')}: {shown(value)}" for name, value in machine.items() if value not in (None, "", [], {}))


def page(summary: Summary, pictures: Mapping[str, str]) -> str:
    """One HTML page. `pictures`: caption -> SVG."""
    # Everything from outside is escaped by the template; the pictures are our own.
    template = Environment(loader=PackageLoader("eyas.bench", "."), autoescape=True).get_template("report.html.j2")
    tables = [
        {"temperature": t, "task": "all tasks" if task == ALL else task, "prompts": rows[0]["prompts"], "rows": [cells(r) for r in rows]}
        for t, task, rows in sections(summary)
    ]
    return template.render(
        summary=summary, heads=HEADS, tables=tables, pictures={k: _inline(v) for k, v in pictures.items()}, notes=NOTES,
        machine=machine_line(summary["machine"]),
    )  # fmt: skip


def _inline(svg: str) -> str:
    """Without the prologue of a file of its own."""
    return svg[svg.index("<svg") :]


def comparison(a: Summary, b: Summary, names: tuple[str, str]) -> str:
    """Two summaries side by side, rows that both have. Ratios of different runs carry the drift between them: said in the text."""
    rows = {(r["temperature"], r["task"], r["method"]): r for r in a["rows"]}
    lines = [
        f"| T | task | method | tok/s {names[0]} | {names[1]} | ratio | speed-up {names[0]} | {names[1]} | tau {names[0]} | {names[1]} |"
    ]
    lines.append("|" + "---|" * 10)
    common = 0
    for r in b["rows"]:
        if (mine := rows.get((r["temperature"], r["task"], r["method"]))) is None:
            continue
        common += 1
        base = mine["tokens_per_second"]
        pairs = [number(x[k]) for k in ("speedup", "tau") for x in (mine, r)]
        ratio = number(r["tokens_per_second"] / base if base else None)
        lines.append(
            "| " + " | ".join([f"{r['temperature']:g}", r["task"], r["method"], number(base, 1), number(r["tokens_per_second"], 1), ratio,
                               pairs[0], pairs[1], pairs[2], pairs[3]]) + " |"
        )  # fmt: skip
    if not common:
        raise InputError("these two benches have no method, task and temperature in common")
    differ = [f"{k}: {x} / {y}" for k in ("target", "dtype", "device") if (x := a["settings"][k]) != (y := b["settings"][k])]
    said = [f"Different settings: {'; '.join(differ)}."] if differ else []
    return "\n".join([*lines, "", *said, "Tokens/s of two runs differ by the machine's drift too; speed-ups are within one run each."])
