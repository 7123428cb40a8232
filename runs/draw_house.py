"""Draw the house: the rings of the trunk, the wings with the sockets that they plug into, and the other distributions.

python runs/draw_house.py    writes docs/pictures/house.svg from the source
"""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from _common import parser
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from eyas.files import write_text

ROOT = Path(__file__).resolve().parents[1]
EYAS = ROOT / "src" / "eyas"
PICTURE = ROOT / "docs" / "pictures" / "house.svg"
STYLE = {"svg.hashsalt": "eyas", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
# From the inside out; a ring imports the rings inside it and nothing else. What is not named here is a wing.
RINGS = {
    "core: the loop": "core errors formats threads timing",
    "methods, and the files of their heads": "drafters checkpoints nn tiny",
    "api, and what wings share": "api arguments text targets files locks passes hardware option_texts elsewhere",
}
COLOURS = ("#cfe3f5", "#e3eef8", "#f1f6fb")
WING = "#fbeed9"
DISTRIBUTION = "#e4f2e0"


class Part(NamedTuple):
    """A module or a package directly under src/eyas."""

    name: str
    lines: int
    sockets: tuple[str, ...]  # that it plugs into
    imports: frozenset[str]  # other parts


def parts() -> dict[str, Part]:
    """Return every part by its name, the package's own `__init__` left out."""
    found = {}
    for place in sorted(EYAS.iterdir()):
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        if place.name.startswith("__") or not files or files[0].suffix != ".py":
            continue
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        sockets = (file.stem.removeprefix("plug_") for file in files if file.stem.startswith("plug_"))
        imports = {*re.findall(r"from eyas\.(\w+)", text), *re.findall(r"^ *from eyas import (\w+)$", text, re.M)}
        found[place.stem] = Part(place.stem, text.count("\n"), tuple(sockets), frozenset(imports - {place.stem}))
    return found


def distributions() -> list[tuple[str, int, str]]:
    """Return the name, the lines and the kinds of entry points of each distribution beside eyas."""
    found = []
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = sum(place.read_text(encoding="utf-8").count("\n") for place in file.parent.glob("src/**/*.py"))
        kinds = ", ".join(group.removeprefix("eyas.") for group in project.get("entry-points", {}))
        found.append((project["name"], lines, kinds))
    return found


def role(part: Part, known: Mapping[str, Part]) -> str:
    """Return how a wing is joined to the rest: by its sockets, by what imports it, or as a user of the trunk."""
    if part.sockets:
        return f"socket: {', '.join(part.sockets)}"
    if "api" in part.imports:
        return "uses api"
    users = [other.name for other in known.values() if part.name in other.imports]
    if not users:
        return "methods"
    return f"used by {', '.join(users[:3])}{', ...' * (len(users) > 3)}"


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    """Draw a box with round corners."""
    shape = f"round,pad=0,rounding_size={min(width, height, 1.2) * 0.25}"
    colours = {"facecolor": colour, "edgecolor": "#5b6b7b", "linewidth": 1}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **colours))


def draw(figure: Figure) -> None:
    """Draw the rings at the left, the wings at the right."""
    axes = figure.subplots()
    axes.set(xlim=(0, 20), ylim=(0, 12))
    axes.set_axis_off()
    known = parts()
    inner = {name for names in RINGS.values() for name in names.split()}
    for depth, (title, names) in reversed(list(enumerate(RINGS.items()))):
        margin = 1.75 * (len(RINGS) - 1 - depth)
        height = 11.6 - 2 * margin
        box(axes, 0.2 + 0.35 * margin, 0.2 + margin, 8.8 - 0.7 * margin, height, COLOURS[depth])
        top = 0.2 + margin + height
        axes.text(4.6, top - 0.3, title, ha="center", va="top", fontsize=10, weight="bold")
        words = [f"{name} {known[name].lines:,}" for name in names.split() if name in known]
        each = 3 if depth < len(RINGS) - 1 else 4
        for line, begin in enumerate(range(0, len(words), each)):
            chunk = "   ".join(words[begin : begin + each])
            axes.text(4.6, top - 0.7 - 0.33 * line, chunk, ha="center", va="top", fontsize=8)
    files = sorted((EYAS / "core").glob("[a-z]*.py"))
    for number, file in enumerate(files):
        x, y = 1.75 + 2.05 * (number % 3), 6.85 - 0.33 * (number // 3)
        axes.text(x, y, f"{file.stem} {len(file.read_text(encoding='utf-8').splitlines())}", fontsize=7, va="top")
    wings = [part for part in known.values() if part.name not in inner]
    wings.sort(key=lambda part: (not part.sockets, -part.lines))
    boxes = [(part.name, part.lines, role(part, known), WING if part.sockets else "#f6f6f6") for part in wings]
    boxes += [(*other, DISTRIBUTION) for other in distributions()]
    step = 11.7 / ((len(boxes) + 1) // 2)
    for number, (name, lines, about, colour) in enumerate(boxes):
        column, row = number % 2, number // 2
        x, y = 10.2 + 4.9 * column, 11.85 - step * (row + 1)
        box(axes, x, y, 4.6, 0.82 * step, colour)
        axes.text(x + 0.2, y + 0.54 * step, name, va="center", fontsize=10, weight="bold")
        axes.text(x + 4.4, y + 0.54 * step, f"{lines:,}", va="center", ha="right", fontsize=9)
        axes.text(x + 0.2, y + 0.22 * step, about, va="center", fontsize=8, color="#444444")
    axes.annotate("", xy=(9.1, 6), xytext=(10.1, 6), arrowprops={"arrowstyle": "->", "linewidth": 1.5})


def main() -> None:
    parser(__doc__, None).parse_args()
    out = io.StringIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 6.6), layout="constrained")
        draw(figure)
        figure.savefig(out, format="svg", metadata={"Date": None})  # the same bytes for the same source
    write_text(PICTURE, "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()))


if __name__ == "__main__":
    main()
