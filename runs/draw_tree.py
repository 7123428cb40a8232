"""Draw the first draft tree of an answer by the embedded model, and the tokens that the target took.

python runs/draw_tree.py    writes docs/pictures/tree.svg, the tree of the README
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from _common import parser, run

import eyas
from eyas.core.engine import Decoder, Step
from eyas_lab.bench.trees import Node, tree_nodes

CHARACTER, PADDING, HEIGHT, ROW, COLUMN = 7.8, 11, 26, 36, 34  # pixels
STYLE = """
    text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #24292f; white-space: pre }
    rect { fill: #f3f4f6; stroke: #b6bcc4 }
    path { fill: none; stroke: #b6bcc4; stroke-width: 1.5 }
    .accepted rect { fill: #d5f2dc; stroke: #2da44e }
    .bonus rect { fill: #dbeafe; stroke: #2f6fde; stroke-dasharray: 4 3 }
    path.accepted { stroke: #2da44e; stroke-width: 2.5 }
    path.bonus { stroke: #2f6fde; stroke-width: 2; stroke-dasharray: 4 3 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      rect { fill: #22272e; stroke: #545d68 }
      path { stroke: #545d68 }
      .accepted rect { fill: #173d24; stroke: #3fb950 }
      .bonus rect { fill: #16305c; stroke: #58a6ff }
      path.accepted { stroke: #3fb950 }
      path.bonus { stroke: #58a6ff }
    }
"""
PROMPT = "I want to book a table for two in San Jose tonight."
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "tree.svg"


def draw_svg(nodes: list[Node]) -> str:
    """The tree from left to right, readable on a light and on a dark page."""
    children = [[m for m, node in enumerate(nodes) if node.parent == n] for n in range(len(nodes))]
    depth = [0] * len(nodes)
    for n, node in enumerate(nodes[1:], 1):
        depth[n] = depth[node.parent] + 1
    widths = [len(node.text) * CHARACTER + 2 * PADDING for node in nodes]
    columns = [max(w for w, d in zip(widths, depth, strict=True) if d == level) for level in range(max(depth) + 1)]
    left = [1 + sum(columns[:d]) + COLUMN * d for d in depth]
    top = [0.0] * len(nodes)
    rows = 0

    def place(n: int) -> None:
        nonlocal rows
        if not children[n]:
            top[n] = 1 + rows * ROW
            rows += 1
            return
        for child in children[n]:
            place(child)
        top[n] = top[children[n][0]]

    place(0)
    width = max(x + w for x, w in zip(left, widths, strict=True)) + 1
    height = (rows - 1) * ROW + HEIGHT + 2
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}',
        '     role="img" aria-label="A draft tree and its accepted path">',
        f"  <style>{STYLE}  </style>",
    ]
    # accepted edges on top
    for n, node in sorted(enumerate(nodes[1:], 1), key=lambda pair: pair[1].kind, reverse=True):
        x0, y0 = left[node.parent] + widths[node.parent], top[node.parent] + HEIGHT / 2
        x1, y1 = left[n], top[n] + HEIGHT / 2
        middle = (x1 + left[n] - COLUMN) / 2
        curve = f"M{x0:.1f} {y0:.1f} L{left[n] - COLUMN:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        parts.append(f'  <path class="{node.kind}" d="{curve}"/>')
    for n, node in enumerate(nodes):
        box = f'<rect x="{left[n]:.1f}" y="{top[n]:.1f}" width="{widths[n]:.1f}" height="{HEIGHT}" rx="6"/>'
        place = f'x="{left[n] + PADDING:.1f}" y="{top[n] + 17.5:.1f}"'
        text = f'<text {place} xml:space="preserve">{escape(node.text)}</text>'
        parts.append(f'  <g class="{node.kind}">{box}{text}</g>')
    return "\n".join([*parts, "</svg>", ""])


def first_cycle(llm: eyas.LLM, prompt: str) -> Step:
    """The first cycle of an answer, after the prompt's pass."""
    decoder = Decoder(llm.target, llm.drafter)
    decoder.add(llm.request(prompt)[0])
    steps = list[Step]()
    while len(steps) < 2:
        steps += decoder.step()
    return steps[1]


def main() -> None:
    parser(__doc__, None).parse_args()
    llm = eyas.load(tree={"nodes": 14, "depth": 5, "branch": 4})

    def shown(token: int) -> str:
        text = llm.tokenizer.decode([token])
        return text.strip() or repr(text)

    PICTURE.write_text(draw_svg(tree_nodes(first_cycle(llm, PROMPT), shown)))


if __name__ == "__main__":
    run(main)
