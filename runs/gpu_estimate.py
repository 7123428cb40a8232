"""Expected times of a cycle on a GPU that is not there, by arithmetic: the table "Expected times"
of docs/lab/gpu_plan.md.

Kernels and bytes as in _gpu_arithmetic.py. Shapes are Llama-3.1-8B's, one row, an EAGLE-3 head with
32,000 draft tokens and trees of 60 nodes. No clock of any GPU has confirmed these figures.

    python runs/gpu_estimate.py
"""

from __future__ import annotations

import _markdown
from _common import parser
from _gpu_arithmetic import NODES, Sizes, cycle, plain_step, target_pass

HEADS = (
    "tokens", "bound, ms", "vanilla, ms", "share of the bound", "60 nodes, ms", "c: fp8, 6 levels", "c: bf16, 8 levels",
)  # fmt: skip


def table() -> str:
    """The table of docs/lab/gpu_plan.md."""
    sizes, lines = Sizes(), list[list[str]]()
    for tokens in (1_024, 16_384):
        bound, vanilla = sizes.bound(tokens), plain_step(sizes, 1, tokens)
        c = [cycle(sizes, 1, levels, weight_bytes, tokens) / vanilla for levels, weight_bytes in ((6, 1), (8, 2))]
        figures = bound / 1e3, vanilla / 1e3, bound / vanilla, target_pass(sizes, 1, NODES, tokens) / 1e3, *c
        lines.append([f"{tokens:,}", *(f"{figure:.2f}" for figure in figures)])
    return _markdown.table(HEADS, lines, numbers=len(HEADS))


def main() -> None:
    parser(__doc__, output=None).parse_args()
    print(table())


if __name__ == "__main__":
    main()
