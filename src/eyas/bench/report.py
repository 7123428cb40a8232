"""From answers to what people read: the summary (JSON), a Markdown table, and one HTML page that needs nothing beside it.

A summary carries its format's number; another one is refused. This module runs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from eyas.bench.metrics import ALL
from eyas.bench.record import FORMAT
from eyas.errors import InputError

__all__ = ["HEADS", "cells", "compared", "comparison", "markdown", "page", "profile_tables", "read_summary", "sections"]

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
STAGES = ("draft", "target", "verify", "commit", "host")
CYCLES = "what the cycles did (stages: ms; memory beside the weights: MB)"
CYCLE_HEADS = ("method", "cycles", "nodes", "drafted", "accepted", *STAGES, "R", "memory")


def cells(row: Mapping[str, Any], intervals: bool = True) -> tuple[str, ...]:
    """A row of the summary, for people."""
    tau, theirs = ((row[k] or (None, None, None))[1:] if intervals else None for k in ("tau_interval", "speedup_vs_transformers_interval"))
    speedup = (row["speedup_low"], row["speedup_high"])  # the ratio that a bench is made for is never shown without its interval
    return (
        row["method"], number(row["tokens_per_second"], 1), number(row["speedup"], 2, speedup),
        number(row["speedup_vs_transformers"], 2, theirs), number(row["tau"], 2, tau), number(row["c"]),
        number(row["first_token_ms"], 1), _texts(row),
    )  # fmt: skip


def _texts(row: Mapping[str, Any]) -> str:
    if row["equal"] is not False:
        return "equal" if row["equal"] else "not compared"
    margins = [margin for *_, margin in row["differ"]]
    widest = "" if None in margins else f", margin up to {max(margins):.1g}"
    return f"{len(row['differ'])} differ{widest}"


def cycle_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What its cycles did."""
    memory, drafted = row["memory_bytes"], row["drafted"]
    return (
        row["method"], f"{row['cycles']:,}", number(row["nodes"], 1), number(drafted, 0), number(row["accepted"], 0),
        *(number(row["cycle_ms"].get(stage)) for stage in STAGES), number(row["R"]), number(memory and memory / 1e6, 0),
    )  # fmt: skip


def probe_table(summary: Summary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: n-alpha of chains, and how well a draft's confidence tells its success; no rows where nothing was looked at."""
    probes = summary["probes"]
    depth = max((len(found["n_alpha"] or ()) for found in probes.values()), default=0)
    rows = []
    for name, found in probes.items():
        alphas = [*(found["n_alpha"] or ()), *[None] * depth][:depth]
        rows.append((name, *(number(alpha) for alpha in alphas), number(found["calibration_error"], 3)))
    return ("method", *(f"{n}-alpha" for n in range(depth)), "calibration error"), rows


def profile_tables(summary: Summary) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, heads, rows): a cycle's stages, what was drafted, and how far a pass is from the machine's bound; none without a profile."""
    profiles: Mapping[str, Any] = summary.get("profiles") or {}
    stages, drafts, bounds = (
        [(name, *cells(found)) for name, found in profiles.items()] for cells in (_stage_cells, _draft_cells, _bound_cells)
    )
    tables = [
        ("Where a cycle's time goes (ms)", ("method", "cycle", *STAGES), stages),
        ("What was drafted (levels: ms)", ("method", "cycles", "plain", "nodes", "tree", "1st level", "each further"), drafts),
        ("How far from the machine's bound", ("method", "context", "MB", "GFLOP", "bound ms", "by", "pass", "cycle"), bounds),
    ]
    return tables if profiles else []


def _stage_cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    return number(found["cycle_ms"]), *(f"{number(found['ms'][stage])} {found['percent'][stage]:2.0f}%" for stage in STAGES)


def _draft_cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    levels = found["levels"] or {"shape": ()}
    tree = "/".join(map(str, levels["shape"])) or "–"
    return (
        str(found["cycles"]), str(found["plain"]), number(found["nodes"], 1), tree, number(levels.get("first_ms")),
        number(levels.get("further_ms")),
    )  # fmt: skip


def _bound_cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    if (bound := found["bound"]) is None:
        return number(found["context"], 0), *["–"] * 6
    return (
        number(found["context"], 0), number(bound["bytes"] / 1e6, 1), number(bound["flops"] / 1e9),
        number(bound["ms"]), bound["binds"], f"{bound['pass_over_bound']:.2f}x", f"{bound['cycle_over_bound']:.2f}x",
    )  # fmt: skip


def sections(summary: Summary) -> list[tuple[float, str, list[Mapping[str, Any]]]]:
    """(temperature, task, rows); pooled tasks first, and alone where there is but one task."""
    tasks = {row["task"] for row in summary["rows"]} - {ALL}
    keys = list(dict.fromkeys((row["temperature"], row["task"]) for row in summary["rows"] if row["task"] == ALL or len(tasks) > 1))
    keys.sort(key=lambda key: (key[0], key[1] != ALL))
    return [(t, task, [r for r in summary["rows"] if (r["temperature"], r["task"]) == (t, task)]) for t, task in keys]


def markdown(summary: Summary) -> str:
    """The tables, the machine and what must be known to read them."""
    lines = [f"# {summary['title']}", "", f"`{summary['command']}`", "", machine_line(summary["machine"]), "", run_line(summary), ""]
    lines += [f"**{warning}**\n" for warning in summary["warnings"]]
    for temperature, task, rows in sections(summary):
        what = "all tasks" if task == ALL else task
        lines += [f"## T = {temperature:g}, {what} ({rows[0]['prompts']} prompts)", ""]
        lines += [*_table(HEADS, map(cells, rows)), ""]
        if task == ALL:
            lines += [f"{CYCLES.capitalize()}:", ""]
            lines += [*_table(CYCLE_HEADS, map(cycle_cells, rows)), ""]
    heads, probed = probe_table(summary)
    lines += ["## Drafts looked at", "", *_table(heads, probed), ""] if probed else []
    for title, heads, profiled in profile_tables(summary):
        lines += [f"## {title}", "", *_table(heads, profiled), ""]
    lines += [f"Not run: {name}: {why}" for name, why in summary["skipped"].items()]
    return "\n".join([*lines, "", NOTES, ""])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(row) + " |" for row in rows)]


NOTES = (
    "Speed-up: decoded tokens per second over vanilla's, on the same prompts, the prompt's own pass apart; vs HF: the same over "
    "transformers' generate. tau: tokens per cycle. c: time of a cycle over a vanilla step. 1st ms: until the first token, the median. "
    "Brackets: 95 %, bootstrap over prompts, paired; of few prompts they are too narrow. Nodes: verified per cycle, the root included. "
    "Milliseconds of a cycle by the host's clock: on a GPU a stage's work may be waited for in a later one. R: tokens per second over "
    "what plain decoding would reach if it did nothing but read the weights. n-alpha: acceptance in a chain after n accepted draft tokens. "
    "Of a profile: plain: cycles without the method's draft, which are in no mean; tree: nodes/depth/branch; 1st level includes reading "
    "what was accepted; by: what binds a pass, bytes over the measured bandwidth or flops over "
    "the measured rate; pass and cycle: how many times as long they took as the bound of a pass."
)


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine card in one line."""

    def shown(name: str, value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{k.removesuffix('_bytes').replace('_', ' ')} {shown(k, v)}" for k, v in value.items() if v is not None)
        if isinstance(value, list):
            return ", ".join(shown(name, v) for v in value)
        if name.endswith("_bytes"):
            return f"{value / 1e9:.1f} GB"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    told = {name: value for name, value in machine.items() if value not in (None, "", [], {})}
    return "; ".join(f"{name.removesuffix('_bytes').replace('_', ' ')}: {shown(name, value)}" for name, value in told.items())


def run_line(summary: Summary) -> str:
    """What was measured of the machine and the run as a whole."""
    bandwidth, peak = summary["bandwidth"], summary["peak_memory_bytes"]
    said = [f"weights read per step: {summary['bytes_per_step'] / 1e6:,.1f} MB"]
    said += [f"memory bandwidth: {bandwidth / 1e9:.1f} GB/s"] if bandwidth else []
    said += [f"arithmetic: {summary['flops_per_second'] / 1e9:,.1f} GFLOP/s"] if summary.get("flops_per_second") else []
    said += [f"peak memory: {peak / 1e6:,.0f} MB"] if peak else []
    return "; ".join([*said, f"answering took {summary['minutes']:.1f} minutes"])


def page(summary: Summary, pictures: Mapping[str, str]) -> str:
    """One HTML page. `pictures`: caption -> SVG."""
    # Everything from outside is escaped by the template; the pictures are our own.
    template = Environment(loader=PackageLoader("eyas.bench", "."), autoescape=True).get_template("report.html.j2")
    pooled, single = list[dict[str, Any]](), list[dict[str, Any]]()
    for t, task, rows in sections(summary):
        title = f"T = {t:g}, {'all tasks' if task == ALL else task} ({rows[0]['prompts']} prompts)"
        (pooled if task == ALL else single).append({"title": title, "heads": HEADS, "rows": [cells(row) for row in rows]})
        if task == ALL:
            pooled.append(
                {
                    "title": f"T = {t:g}, {CYCLES}",
                    "heads": CYCLE_HEADS,
                    "rows": [cycle_cells(row) for row in rows],
                }
            )
    heads, probed = probe_table(summary)
    pooled += [{"title": "Drafts looked at", "heads": heads, "rows": probed}] if probed else []
    pooled += [{"title": title, "heads": heads, "rows": profiled} for title, heads, profiled in profile_tables(summary)]
    return template.render(
        summary=summary, pooled=pooled, single=single, pictures={k: _inline(v) for k, v in pictures.items()}, notes=NOTES,
        machine=machine_line(summary["machine"]), run=run_line(summary),
    )  # fmt: skip


def _inline(svg: str) -> str:
    """Without the prologue of a file of its own."""
    return svg[svg.index("<svg") :]


def compared(a: Summary, b: Summary) -> dict[str, Any]:
    """Rows that both have, side by side, and the settings in which they differ. InputError when they have no row in common."""
    keys = ("temperature", "task", "method")
    rows = {tuple(r[k] for k in keys): r for r in a["rows"]}
    pairs = [(rows[key], r) for r in b["rows"] if (key := tuple(r[k] for k in keys)) in rows]
    if not pairs:
        raise InputError("these two benches have no method, task and temperature in common")
    table = [
        {
            **{k: mine[k] for k in keys}, "ratio": _ratio(theirs["tokens_per_second"], mine["tokens_per_second"]),
            **{name: {k: row[k] for k in SIDE} for name, row in (("a", mine), ("b", theirs))},
        }
        for mine, theirs in pairs
    ]  # fmt: skip
    differ = {}
    for name in sorted(a["settings"].keys() | b["settings"].keys()):
        both = [x["settings"].get(name) for x in (a, b)]
        if both[0] != both[1]:
            differ[name] = both if name not in LONG else None
    return {"titles": [a["title"], b["title"]], "rows": table, "differ": differ}


SIDE = ("tokens_per_second", "speedup", "speedup_low", "speedup_high", "tau", "c")
LONG = ("methods", "prompts", "texts", "fingerprint")  # settings that are named, not shown


def _ratio(over: float, under: float) -> float | None:
    return round(over / under, 4) if under else None


def comparison(a: Summary, b: Summary, names: tuple[str, str]) -> str:
    """Two summaries side by side, rows that both have, as Markdown. The ratio of different runs carries the drift between them: said."""
    found = compared(a, b)
    heads = ["T", "task", "method"]
    heads += [f"{what} {name}" for what in ("tok/s", "speed-up", "tau", "c") for name in ("A", "B")]
    heads.insert(5, "B / A")
    rows = []
    for row in found["rows"]:
        sides = (row["a"], row["b"])
        speeds = [number(side["tokens_per_second"], 1) for side in sides]
        gains = [number(side["speedup"], 2, (side["speedup_low"], side["speedup_high"])) for side in sides]
        others = [number(side[k]) for k in ("tau", "c") for side in sides]
        rows.append([f"{row['temperature']:g}", row["task"], row["method"], *speeds, number(row["ratio"]), *gains, *others])
    lines = [f"{letter}: {name} ({title})" for letter, name, title in zip("AB", names, found["titles"], strict=True)]
    shown = [name if both is None else f"{name} ({both[0]} / {both[1]})" for name, both in found["differ"].items()]
    said = [f"Different settings: {', '.join(shown)}.", ""] if shown else []
    drift = "Tokens/s of two runs differ by the machine's drift too; speed-ups are within one run each."
    return "\n".join([*lines, "", *_table(heads, rows), "", *said, drift])
