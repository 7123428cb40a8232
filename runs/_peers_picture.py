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


def draw(found: Mapping[str, Any], exact: Mapping[str, bool], path: Path) -> None:
    """Decoding speed by engine as bars, and the cost of passes against their tokens."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8.5, 0.22 * len(found) + 1.4), layout="constrained")
        bars, passes = figure.subplots(1, 2, width_ratios=(1.7, 1))
        ordered = sorted(found, key=lambda name: found[name]["tokens_per_second"][0])
        for place, name in enumerate(ordered):
            value, low, high = found[name]["tokens_per_second"]
            color = OURS if name.startswith("eyas") else OTHERS
            bars.barh(place, value, color=color, alpha=1.0 if exact[name] else 0.5)
            bars.plot([low, high], [place, place], color="black", linewidth=1)
        bars.set_yticks(range(len(ordered)), ordered)
        bars.set_title("decoding, tokens per second (pale: rounded weights)")
        for name in found:
            cost = found[name]["pass_ms"]
            if cost and exact[name] and (not name.startswith("eyas") or name == "eyas, plain"):
                sizes = [int(n) for n in cost]
                one = cost[str(sizes[0])]
                shown = name.split(", ")[0] + (", " + name.rsplit(", ", 1)[1] if name.count(", ") > 1 else "")
                passes.plot(sizes, [cost[str(n)] / one for n in sizes], marker="o", markersize=3, label=shown)
        passes.set_title("a pass over n tokens, over one")
        passes.set_xlabel("tokens")
        passes.set_ylim(bottom=0)
        passes.legend()
        figure.savefig(path, format="svg", metadata={"Date": None})
