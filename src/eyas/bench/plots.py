"""The pictures of a bench as SVG. Each is drawn from the summary; one that has nothing to show is
left out."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyas.bench.rows import ALL

__all__ = ["pictures"]

Summary = Mapping[str, Any]
STYLE: Any = {
    "svg.hashsalt": "eyas", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif", "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
STAGES = {"draft": "#3b7dd8", "target": "#e0853d", "verify": "#59a14f", "commit": "#9c6ade", "host": "#9aa3b2"}
WITHOUT_DRAFT = ("vanilla", "transformers")
WIDTH = 8.5  # inches, of every picture
FEWEST_NODES = 5  # a bin of confidence with fewer is not drawn
FEWEST_CYCLES = 20  # a stretch of the context with fewer is not drawn


def pictures(summary: Summary) -> dict[str, tuple[str, str]]:
    """File name -> (caption, SVG)."""
    every: dict[str, tuple[str, Callable[[Summary], Figure | None]]] = {
        "speedup": ("Speed-up over vanilla decoding in the same run; strokes: 95 % over prompts.", _speedup),
        "tau": ("tau, tokens per cycle, by task.", _tau),
        "cycle": ("Where a cycle's time goes (host clock); the line is a vanilla step.", _cycle),
        "depth": (
            "Share of cycles that accept the draft token of a depth, of those that accepted all before it and drafted it.",
            _depth,
        ),
        "context": (
            f"tau by the number of tokens before the cycle, the prompt's included; from {FEWEST_CYCLES} cycles on.",
            _context,
        ),
        "positions": (
            "min(1, p/q) by position in the tree: mean and standard deviation over nodes whose parent was accepted.",
            _positions,
        ),
        "calibration": (
            "How often a drafted token is accepted, against the draft's confidence; larger dots: more tokens.",
            _calibration,
        ),
        "cost": ("Time of one pass of the target against the number of nodes, over that of one node.", _cost),
    }
    drawn = {}
    with rc_context(STYLE):
        for name, (caption, draw) in every.items():
            figure = draw(summary)
            if figure is not None:
                out = io.StringIO()
                figure.savefig(out, format="svg", metadata={"Date": None})
                drawn[name] = caption, out.getvalue()
    return drawn


def _pooled(summary: Summary, temperature: float) -> list[Mapping[str, Any]]:
    """The rows of all tasks together."""
    return [r for r in summary["rows"] if r["temperature"] == temperature and r["task"] == ALL]


def _temperatures(summary: Summary) -> list[float]:
    return list(dict.fromkeys(r["temperature"] for r in summary["rows"]))


def _label(name: str) -> str:
    """A method with its options, wrapped."""
    return textwrap.fill(name.replace(":", ": "), 26, break_long_words=False).replace(": ", ":")


def _lines(names: Iterable[str]) -> int:
    """Lines that the labels of these methods take."""
    return sum(max(1, 1 + _label(name).count("\n")) for name in names)


def _axes(height: float, width: float = WIDTH) -> tuple[Figure, Any]:
    """A figure of this size in inches, and its only axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _axes_with_legend(names: Iterable[str], least: float = 3.4) -> tuple[Figure, Any]:
    """A figure high enough for a legend of these names at its right side, and its only axes."""
    return _axes(max(least, 0.6 + 0.2 * _lines(names)))


def _looks(summary: Summary) -> dict[str, dict[str, Any]]:
    """Method -> colour and line style, the same in every picture."""
    methods = dict.fromkeys([*(r["method"] for r in summary["rows"]), *summary["probes"]])
    return {name: {"color": f"C{i % 10}", "ls": ("-", "--", ":")[i // 10 % 3]} for i, name in enumerate(methods)}


def _speedup(summary: Summary) -> Figure | None:
    temperatures = _temperatures(summary)
    first = {r["method"]: r["speedup"] for r in _pooled(summary, temperatures[0]) if r["speedup"] is not None}
    methods = sorted((name for name in first if name != "vanilla"), key=lambda name: -first[name])
    if not methods:
        return None
    figure, axes = _axes(0.9 + 0.34 * max(len(methods) * len(temperatures), _lines(methods) * 0.6))
    height = 0.8 / len(temperatures)  # of a bar
    for place, temperature in enumerate(temperatures):
        rows = {r["method"]: r for r in _pooled(summary, temperature) if r["speedup"] is not None}
        at = [i + place * height for i, m in enumerate(methods) if m in rows]
        here = [rows[m] for m in methods if m in rows]
        values = [r["speedup"] for r in here]
        bars = axes.barh(
            at,
            values,
            height * 0.9,
            xerr=_error_bars(here),
            color=f"C{place}",
            error_kw={"lw": 1},
            label=f"T = {temperature:g}",
        )
        axes.bar_label(bars, [f" {value:.2f}x" for value in values], fontsize=8, padding=3)
    axes.axvline(1, color="0.4", lw=1)
    axes.set(
        yticks=[i + 0.4 - height / 2 for i in range(len(methods))],
        yticklabels=map(_label, methods),
        xlabel="speed-up over vanilla",
    )
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.01)
    if len(temperatures) > 1:
        axes.legend(ncols=len(temperatures), loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def _error_bars(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the interval of each row's speed-up reaches below it, and above it."""
    below, above = list[float](), list[float]()
    for row in rows:
        value, low, high = (row[key] for key in ("speedup", "speedup_low", "speedup_high"))
        below.append(max(0.0, value - (value if low is None else low)))
        above.append(max(0.0, (high or value) - value))
    return [below, above]


def _tau(summary: Summary) -> Figure | None:
    temperature = _temperatures(summary)[0]
    rows = [
        r for r in summary["rows"] if r["temperature"] == temperature and r["tau"] and r["method"] not in WITHOUT_DRAFT
    ]
    tasks, methods = (list(dict.fromkeys(r[k] for r in rows)) for k in ("task", "method"))
    if len(tasks) < 3:  # one, and all
        return None
    table = {(r["method"], r["task"]): r["tau"] for r in rows}
    methods.sort(key=lambda name: -table.get((name, ALL), 0))
    figure, axes = _axes(1.3 + 0.32 * len(methods), max(WIDTH, 3 + 0.8 * len(tasks)))
    values = [[table.get((m, t), float("nan")) for t in tasks] for m in methods]
    shown = axes.imshow(values, cmap="YlGnBu", aspect="auto", vmin=1)
    known = [(i, j, value) for i, row in enumerate(values) for j, value in enumerate(row) if not math.isnan(value)]
    middle = (1 + max(value for *_, value in known)) / 2
    for i, j, value in known:
        colour = "white" if value > middle else "black"
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axes.set(
        xticks=range(len(tasks)),
        yticks=range(len(methods)),
        yticklabels=map(_label, methods),
        title=f"T = {temperature:g}",
    )
    axes.set_xticklabels([t.rpartition("/")[2] for t in tasks], rotation=20, ha="right")
    figure.colorbar(shown, label="tau", shrink=0.8)
    return figure


def _cycle(summary: Summary) -> Figure | None:
    rows = [r for r in _pooled(summary, _temperatures(summary)[0]) if r["cycle_ms"]]
    rows.sort(key=lambda r: sum(r["cycle_ms"].values()))
    if not rows:
        return None
    figure, axes = _axes(0.9 + 0.32 * len(rows))
    begin = [0.0] * len(rows)
    for stage, colour in STAGES.items():
        width = [r["cycle_ms"].get(stage, 0.0) for r in rows]
        axes.barh(range(len(rows)), width, 0.7, left=begin, color=colour, label=stage)
        begin = [a + b for a, b in zip(begin, width, strict=True)]
    vanilla = next((sum(r["cycle_ms"].values()) for r in rows if r["method"] == "vanilla"), None)
    if vanilla is not None:
        axes.axvline(vanilla, color="0.2", lw=1, ls="--")
    axes.set(yticks=range(len(rows)), yticklabels=[_label(r["method"]) for r in rows], xlabel="ms per cycle")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.legend(ncols=5, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def _depth(summary: Summary) -> Figure | None:
    pooled = _pooled(summary, _temperatures(summary)[0])
    rows = [r for r in pooled if any(v is not None for v in r["acceptance_by_depth"])]
    if not rows:
        return None
    figure, axes = _axes_with_legend(r["method"] for r in rows)
    for row in rows:
        known = [(d, v) for d, v in enumerate(row["acceptance_by_depth"]) if v is not None]
        look = _looks(summary)[row["method"]]
        axes.plot(*zip(*known, strict=True), marker="o", ms=3.5, lw=1.2, label=_label(row["method"]), **look)
    axes.set(xlabel="draft tokens accepted before", ylabel="acceptance", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _context(summary: Summary) -> Figure | None:
    rows = [r for r in _pooled(summary, _temperatures(summary)[0]) if r["method"] not in WITHOUT_DRAFT]
    known = {r["method"]: [p for p in r["tau_by_position"] if p["cycles"] >= FEWEST_CYCLES] for r in rows}
    places = sorted({p["from"] for found in known.values() for p in found})
    if len(places) < 2:
        return None
    figure, axes = _axes_with_legend(known)
    for name, found in known.items():
        x, y = ([p[k] for p in found] for k in ("from", "tau"))
        axes.plot(x, y, marker="o", ms=3.5, lw=1.2, label=_label(name), **_looks(summary)[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"from {begin:,}" for begin in places])
    axes.minorticks_off()
    axes.set(ylabel="tau", ylim=(1, None), xlabel="tokens before the cycle")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _probes(summary: Summary, part: str) -> dict[str, Mapping[str, Any]]:
    """The probes that have this part, by method."""
    return {name: probe for name, probe in summary["probes"].items() if probe.get(part)}


def _positions(summary: Summary) -> Figure | None:
    probes = {name: probe for name, probe in _probes(summary, "positions").items() if "alpha" in probe["positions"][0]}
    if not probes:
        return None
    columns = min(3, len(probes))
    lines = -(-len(probes) // columns)
    figure = Figure(figsize=(WIDTH, 0.4 + 2.3 * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
    shown = {}
    for axes, (name, probe) in zip(every, probes.items(), strict=False):
        for rank in range(4):
            here = [p for p in probe["positions"] if p["rank"] == rank and p["depth"] <= 6]
            x, y, sd = ([p[k] + (0.1 * rank if k == "depth" else 0) for p in here] for k in ("depth", "alpha", "sd"))
            if here:
                shown[f"rank {rank + 1}"] = axes.errorbar(
                    x, y, sd, marker="o", ms=3, lw=0.9, elinewidth=0.6, capsize=1.5, color=f"C{rank}"
                )
        axes.set(ylim=(0, 1.05))
        axes.set_title(_label(name), fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in every[len(probes) :]:
        axes.set_visible(False)
    figure.supxlabel("depth", fontsize=9)
    figure.supylabel("min(1, p/q)", fontsize=9)
    figure.legend(shown.values(), shown.keys(), loc="outside upper right", ncols=4)
    return figure


def _calibration(summary: Summary) -> Figure | None:
    probes = _probes(summary, "bins")
    if not probes:
        return None
    figure, axes = _axes_with_legend((f"{name} (error 0.123)" for name in probes), least=3.6)
    axes.plot([0, 1], [0, 1], color="0.6", lw=1, ls=":")
    for name, probe in probes.items():
        look = _looks(summary)[name]
        bins = [b for b in probe["bins"] if b["n"] >= FEWEST_NODES]
        x, y = ([b[k] for b in bins] for k in ("confidence", "hit"))
        axes.scatter(x, y, [6 * b["n"] ** 0.5 for b in bins], color=look["color"])
        axes.plot(x, y, lw=1.2, label=_label(f"{name} (error {probe['calibration_error']:.3f})"), **look)
    axes.set(xlabel="confidence of the draft", ylabel="accepted", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _cost(summary: Summary) -> Figure | None:
    curve = summary.get("verify_cost")
    if not curve:
        return None
    figure, axes = _axes(3.2)
    axes.plot([p["nodes"] for p in curve], [p["ms"] / curve[0]["ms"] for p in curve], marker="o", ms=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks([p["nodes"] for p in curve], [str(p["nodes"]) for p in curve])
    axes.set(xlabel="nodes", ylabel=f"time over one node's ({curve[0]['ms']:.1f} ms)", ylim=(0, None))
    return figure
