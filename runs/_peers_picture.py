"""The picture of runs/peers.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from _pictures import svg
from matplotlib.figure import Figure

from eyas.files import write_text

STYLE: Any = {"font.size": 9, "axes.titlesize": 10, "legend.fontsize": 8}
OURS, OTHERS = "#2e7d32", "#9aa3b2"
LINES = {
    "eyas": OURS,
    "transformers": "#3b7dd8",
    "OpenVINO GenAI": "#e0853d",
    "llama.cpp": "#9c6ade",
    "SafeAILab's code": "#b09060",
}


def draw(figures: Mapping[str, Any], exact: Mapping[str, bool], path: Path) -> None:
    """Decoding speed by engine as bars, and the cost of passes against their tokens."""
    size = (9, 0.22 * len(figures) + 1.2)
    write_text(path, svg(partial(_draw, figures, exact), size, STYLE))


def _draw(figures: Mapping[str, Any], exact: Mapping[str, bool], figure: Figure) -> None:
    bars, passes = figure.subplots(1, 2, width_ratios=(1.5, 1))
    ordered = sorted(figures, key=lambda name: figures[name]["tokens_per_second"][0])
    for place, name in enumerate(ordered):
        value, low, high = figures[name]["tokens_per_second"]
        color = OURS if name.startswith("eyas") else OTHERS
        bars.barh(place, value, color=color, alpha=1.0 if exact[name] else 0.5)
        bars.plot([low, high], [place, place], color="black", linewidth=1)
    bars.set_yticks(range(len(ordered)), ordered)
    bars.set_title("decoding, tokens/s (pale: rounded weights)")
    for name, row in figures.items():
        cost = row["pass_ms"]
        if cost and exact[name] and (not name.startswith("eyas") or name == "eyas, plain"):
            engine = name.split(", ")[0]
            shown = engine + (", " + name.rsplit(", ", 1)[1] if name.count(", ") > 1 else "")
            line = {"marker": "o", "markersize": 3, "color": LINES.get(engine), "label": shown}
            passes.plot([int(n) for n in cost], list(cost.values()), **line)
    passes.set_title("ms of a pass, by its tokens")
    passes.set_ylim(bottom=0)
    passes.margins(y=0.3)
    passes.legend(loc="upper left")
