"""The picture of runs/peers.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

STYLE: Any = {
    "svg.hashsalt": "eyas", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif", "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
OURS, OTHERS = "#2e7d32", "#9aa3b2"
LINES = {
    "eyas": OURS,
    "transformers": "#3b7dd8",
    "OpenVINO GenAI": "#e0853d",
    "llama.cpp": "#9c6ade",
    "SafeAILab's code": "#b09060",
}


def draw(found: Mapping[str, Any], exact: Mapping[str, bool], path: Path) -> None:
    """Decoding speed by engine as bars, and the cost of passes against their tokens."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 0.22 * len(found) + 1.2), layout="constrained")
        bars, passes = figure.subplots(1, 2, width_ratios=(1.5, 1))
        ordered = sorted(found, key=lambda name: found[name]["tokens_per_second"][0])
        for place, name in enumerate(ordered):
            value, low, high = found[name]["tokens_per_second"]
            color = OURS if name.startswith("eyas") else OTHERS
            bars.barh(place, value, color=color, alpha=1.0 if exact[name] else 0.5)
            bars.plot([low, high], [place, place], color="black", linewidth=1)
        bars.set_yticks(range(len(ordered)), ordered)
        bars.set_title("decoding, tokens/s (pale: rounded weights)")
        for name in found:
            cost = found[name]["pass_ms"]
            if cost and exact[name] and (not name.startswith("eyas") or name == "eyas, plain"):
                shown = name.split(", ")[0] + (", " + name.rsplit(", ", 1)[1] if name.count(", ") > 1 else "")
                color = LINES.get(name.split(", ")[0])
                passes.plot(
                    [int(n) for n in cost], list(cost.values()), marker="o", markersize=3, color=color, label=shown
                )
        passes.set_title("ms of a pass, by its tokens")
        passes.set_ylim(bottom=0)
        passes.margins(y=0.3)
        passes.legend(loc="upper left")
        figure.savefig(path, format="svg", metadata={"Date": None})
