"""Pictures of the pages: SVG files that are the same for the same figures."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

STYLE: Any = {
    "svg.hashsalt": "eyas",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def svg(draw: Callable[[Figure], None], size: tuple[float, float], style: Any) -> str:
    """The SVG of a figure that `draw` fills."""
    with rc_context({**STYLE, **style}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
