"""The summary of a bench as people read it, in Markdown.

A summary carries the number of its format; another one is refused. This module runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.files import parse_json
from eyas_lab import metrics
from eyas_lab.bench.record import FORMAT
from eyas_lab.bench.rows import ALL
from eyas_lab.markdown import table

__all__ = ["COLUMNS", "cells", "comparison", "markdown", "read_summary", "sections"]

Summary = Mapping[str, Any]
Row = Mapping[str, Any]


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary in a file or folder. Raise InputError when it is none of this format."""
    place = path / "summary.json" if path.is_dir() else path
    try:
        summary = parse_json(place.read_bytes())
    except (OSError, InputError) as error:
        raise InputError(f"{place} cannot be read as a summary of `eyas bench`: {error}") from error
    if not isinstance(summary, dict) or "rows" not in summary:
        raise InputError(f"{place} is not a summary of `eyas bench`: pass a folder or its summary.json")
    if summary.get("format") != FORMAT:
        raise InputError(f"{place} has format {summary.get('format')}, this eyas reads {FORMAT}: run the bench again")
    return summary


# --- cells and tables --------------------------------------------------------------------------------

COLUMNS = ("method", "tok/s", "speed-up", "vs HF", "tau", "c", "1st ms", "texts")  # HF: transformers' generate
STAGES = (*metrics.STAGES, "host")
CYCLES = "cycles (stages: ms; memory without the weights: MB)"
CYCLE_COLUMNS = ("method", "cycles", "nodes", "drafted", "accepted", "MAL", *STAGES, "R", "memory")
NOTES = (
    "Speed-up: tokens per second of the cycles over vanilla's, on the same prompts, the prompt's own pass apart; vs HF: the same over "
    "transformers' generate. tau: emitted tokens per cycle. c: seconds of a cycle over a vanilla step. 1st ms: until the first token, "
    "the median. Brackets: 95 %, bootstrap over prompts, paired; of few prompts they are too narrow. Nodes: verified per cycle, the root "
    "included. MAL: mean acceptance length, 1 + accepted / drafts before cutting. Milliseconds of a cycle by the host's clock: on a GPU a "
    "stage's work may be waited for in a later one. R: tokens per second over what plain decoding would reach if it did nothing but read "
    "the weights."
)
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, columns, rows


def number(value: float | None, digits: int = 2, low_high: Sequence[float | None] | None = None) -> str:
    """`2.31 [2.20, 2.42]`; a dash where there is none."""
    if value is None:
        return "–"
    if not low_high or low_high[0] is None or low_high[1] is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def cells(row: Row, intervals: bool = True) -> tuple[str, ...]:
    """Return the main cells of a row. The speed-up is never shown without its interval."""
    if row.get("error"):
        return (row["method"], *["–"] * (len(COLUMNS) - 2), "failed")
    tau, over_theirs = (
        (row[key] or (None, None, None))[1:] if intervals else None
        for key in ("tau_interval", "speedup_vs_transformers_interval")
    )
    return (
        row["method"],
        number(row["tokens_per_second"], 1),
        number(row["speedup"], 2, (row["speedup_low"], row["speedup_high"])),
        number(row["speedup_vs_transformers"], 2, over_theirs),
        number(row["tau"], 2, tau),
        number(row["c"]),
        number(row["first_token_ms"], 1),
        _texts(row),
    )


def _texts(row: Row) -> str:
    if row["equal"] is not False:
        return "equal" if row["equal"] else "not compared"
    margins = [margin for *_, margin in row["differ"]]
    widest = "" if None in margins else f", margin up to {max(margins):.1g}"
    return f"{len(row['differ'])} differ{widest}"


def cycle_cells(row: Row) -> tuple[str, ...]:
    """Return the cells about a row's cycles."""
    memory = row["memory_bytes"]
    return (
        row["method"],
        f"{row['cycles']:,}",
        number(row["nodes"], 1),
        number(row["drafted"], 0),
        number(row["accepted"], 0),
        number(row.get("mean_acceptance_length")),
        *(number(row["cycle_ms"].get(stage)) for stage in STAGES),
        number(row["R"]),
        number(memory and memory / 1e6, 0),
    )


def sections(summary: Summary) -> list[tuple[float, str, list[Row]]]:
    """(temperature, task, rows): pooled tasks first, and alone where there is but one task."""
    tasks = {row["task"] for row in summary["rows"]} - {ALL}
    keys = list(
        dict.fromkeys((r["temperature"], r["task"]) for r in summary["rows"] if r["task"] == ALL or len(tasks) > 1)
    )
    keys.sort(key=lambda key: (key[0], key[1] != ALL))
    return [(t, task, [r for r in summary["rows"] if (r["temperature"], r["task"]) == (t, task)]) for t, task in keys]


def _tables(summary: Summary) -> list[Table]:
    """Return the pooled tables first, then all others."""
    main, cycles, tasks = list[Table](), list[Table](), list[Table]()
    for temperature, task, rows in sections(summary):
        title = f"T = {temperature:g}, {'all tasks' if task == ALL else task} ({rows[0]['prompts']} prompts)"
        (main if task == ALL else tasks).append((title, COLUMNS, [cells(row) for row in rows]))
        if task == ALL:
            cycle_rows = [cycle_cells(r) for r in rows if not r.get("error")]
            cycles.append((f"T = {temperature:g}, {CYCLES}", CYCLE_COLUMNS, cycle_rows))
    return [*main, *cycles, *tasks]


# --- pages -------------------------------------------------------------------------------------------


def markdown(summary: Summary) -> str:
    """Return the tables, the machine, and the notes that explain them."""
    lines = [f"# {summary['title']}", ""]
    lines += [f"**{warning}**\n" for warning in summary["warnings"]]
    lines += [f"**{name} failed and is in no figure: {why}**\n" for name, why in summary.get("failed", {}).items()]
    for title, columns, rows in _tables(summary):
        lines += [f"## {title}", "", *table(columns, rows), ""]
    lines += [f"Not run: {name}: {why}" for name, why in summary["skipped"].items()]
    return "\n".join([*lines, "", f"`{summary['command']}`", "", *_facts(summary), "", NOTES, ""])


def _facts(summary: Summary) -> Iterator[str]:
    """Yield the measurements of the run as a whole, and the machine card."""
    bandwidth, peak = summary["bandwidth"], summary["peak_memory_bytes"]
    yield f"- weights read per step: {summary['bytes_per_step'] / 1e6:,.1f} MB"
    if bandwidth:
        yield f"- memory bandwidth: {bandwidth / 1e9:.1f} GB/s"
    if peak:
        yield f"- peak memory: {peak / 1e6:,.0f} MB"
    yield f"- answering took {summary['minutes']:.1f} minutes"
    for name, value in summary["machine"].items():
        if value not in (None, "", [], {}):
            yield f"- {name}: {value if isinstance(value, str) else json.dumps(value)}"


# --- two summaries -----------------------------------------------------------------------------------

LONG = ("methods", "prompts", "texts", "fingerprint")  # settings whose two values are not shown


def comparison(a: Summary, b: Summary, names: tuple[str, str]) -> str:
    """Return two summaries side by side as Markdown. The ratio of two runs includes the drift between them, and the
    text says so. Raise InputError if they have no row in common."""
    rows = {(r["temperature"], r["task"], r["method"]): r for r in a["rows"]}
    pairs = [(key, (rows[key], r)) for r in b["rows"] if (key := (r["temperature"], r["task"], r["method"])) in rows]
    if not pairs:
        raise InputError("these two benches have no method, task and temperature in common")
    columns = (
        "T",
        "task",
        "method",
        "tok/s A",
        "tok/s B",
        "B / A",
        "speed-up A",
        "speed-up B",
        "tau A",
        "tau B",
        "c A",
        "c B",
    )
    lines_of = []
    for (temperature, task, method), sides in pairs:
        speeds = [side["tokens_per_second"] for side in sides]
        gains = [number(side["speedup"], 2, (side["speedup_low"], side["speedup_high"])) for side in sides]
        others = [number(side[name]) for name in ("tau", "c") for side in sides]
        ratio = number(speeds[1] / speeds[0] if all(speeds) else None)
        lines_of.append([f"{temperature:g}", task, method, *(number(x, 1) for x in speeds), ratio, *gains, *others])
    titles = zip("AB", names, (a["title"], b["title"]), strict=True)
    lines = [f"{letter}: {name} ({title})" for letter, name, title in titles]
    differ = []
    for name in sorted(a["settings"].keys() | b["settings"].keys()):
        first, second = (side["settings"].get(name) for side in (a, b))
        if first != second:
            differ.append(name if name in LONG else f"{name} ({first} / {second})")
    settings = [f"Different settings: {', '.join(differ)}.", ""] if differ else []
    drift = "Tokens/s of two runs differ by the machine's drift too; speed-ups are within one run each."
    return "\n".join([*lines, "", *table(columns, lines_of), "", *settings, drift])
