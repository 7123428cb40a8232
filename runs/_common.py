"""What the experiments share: a head under other options, intervals, rows that outlive an interruption, figures."""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from _command import command as command
from _command import machine as machine
from _command import run as run
from matplotlib.figure import Figure
from scipy.stats import bootstrap

from eyas.core.drafter import build_options
from eyas.drafters import Drafter, find
from eyas.errors import InputError

# Okabe and Ito's, which the colour-blind can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
MARKERS = "os^Dv<>P"


def variant(head: Drafter, method: str, options: dict[str, object]) -> Drafter:
    """The same head under another method of its family and other options."""
    kind = find(method)
    drafter = copy.copy(head) if kind.needs_weights else kind(head.target)
    drafter.__class__, drafter.options = kind, build_options(kind.Options, options)
    return drafter


def read_book(path: Path) -> str:
    """A book without Project Gutenberg's preface and licence."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as f:
        text = f.read()
    start = re.search(r"\*\*\* ?START OF.*?\*\*\*", text)
    end = re.search(r"\*\*\* ?END OF", text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip()


# --- intervals


def interval(statistic: Callable[..., np.ndarray], columns: Sequence[Sequence[float]], seed: int = 0) -> list[float | None]:
    """[value, low, high]: a statistic of paired columns, 95 %, bootstrap over their rows; without an interval below two rows."""
    arrays = tuple(np.asarray(column, float) for column in columns)
    with np.errstate(all="ignore"):
        found = [float(statistic(*arrays, axis=-1))]
        if len(arrays[0]) > 1:
            drawn = bootstrap(arrays, statistic, paired=True, n_resamples=4000, method="percentile", rng=seed).confidence_interval
            found += [float(drawn.low), float(drawn.high)]
        else:
            found += [np.nan, np.nan]
    return [round(x, 4) if np.isfinite(x) else None for x in found]


def over(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    """Ratio of sums."""
    return a.sum(axis) / b.sum(axis)


def over_over(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int = -1) -> np.ndarray:
    """Ratio of two ratios of sums: (a / b) / (c / d)."""
    return over(a, b, axis) / over(c, d, axis)


def quartiles(values: Sequence[float]) -> list[float]:
    """[median, first quartile, third quartile]."""
    return [round(float(x), 4) for x in np.percentile(values, [50, 25, 75])]


# --- rows that outlive an interruption


class Rows:
    """A file of rows, each written when it is measured; a run that is started again with the same settings goes on after the last."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if lines and lines[0] != (told := json.loads(json.dumps({"settings": settings}))):
            differ = [k for k in told["settings"] if lines[0].get("settings", {}).get(k) != told["settings"][k]]
            raise InputError(f"{path} was measured with other settings ({', '.join(differ)}): give another --output, or move it away")
        self.path, self.rows = path, {json.dumps(line["key"]): line for line in lines[1:]}
        if not lines:
            self._write({"settings": settings})

    def __contains__(self, key: list[object]) -> bool:
        return json.dumps(key) in self.rows

    def add(self, key: list[object], row: dict[str, object]) -> None:
        self.rows[json.dumps(key)] = {"key": key, **row}
        self._write({"key": key, **row})

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as f:
            print(json.dumps(line), file=f, flush=True)

    def of(self, *head: object) -> list[dict]:
        """The rows whose key begins like that."""
        return [row for row in self.rows.values() if row["key"][: len(head)] == list(head)]


# --- figures

STYLE = {
    "svg.hashsalt": "eyas", "svg.fonttype": "path", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5, "legend.frameon": False, "lines.linewidth": 1.4, "lines.markersize": 4,
}  # fmt: skip


def draw(path: Path, panels: int, paint: Callable[..., None], height: float = 3.2) -> None:
    """`paint(figure, axes)` on panels side by side, saved as an SVG that is the same for the same numbers."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * panels, height), layout="constrained")
        paint(figure, figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def line(axis: object, number: int, x: Sequence[float], points: Sequence[Sequence[float | None]], label: str, bars: float = 0) -> None:
    """A curve with its interval as a band, or, with `bars`, as bars that are moved aside by that much; points are [value, low, high]."""
    value, low, high = (np.array([np.nan if p[i] is None else p[i] for p in points], float) for i in range(3))
    look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "label": label}
    if bars:
        aside = np.array(x) + bars * number
        axis.errorbar(aside, value, [value - low, high - value], linewidth=0.8, **look)  # type: ignore[attr-defined]
    else:
        axis.plot(x, value, **look)  # type: ignore[attr-defined]
        axis.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)  # type: ignore[attr-defined]


def legend(figure: Figure, axis: object, columns: int) -> None:
    """Below all panels."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=columns)  # type: ignore[attr-defined]
