"""Expected times of a 70B target split over several GPUs that are not there, by arithmetic: the
table "Several GPUs" of docs/lab/gpu_plan.md.

    python runs/gpu_parallel.py

Kernels, bytes and collectives as in _gpu_arithmetic.py, each GPU with its share of the heads, of
the inner width and of the vocabulary. Two sums over all GPUs a layer, after the output matrix and
after the MLP, in the target and in the draft; one gathering of the logits a pass, one of the best
children a level. Shapes are Llama-3.1-70B's in bfloat16, one row behind 1,024 tokens, an EAGLE-3
head of the same layer shape with 32,000 draft tokens in fp8, 60 nodes, 6 levels. Nothing of it has
been measured.
"""

from __future__ import annotations

import _markdown
from _common import parser
from _gpu_arithmetic import NODES, Sizes, cycle, draft, plain_step, target_pass

TARGET = Sizes(hidden=8192, inner=28_672, heads=64, layers=80)
TOKENS = 1024
GPUS = (1, 2, 4, 8)
HEADS = (
    "GPUs", "GB of weights each", "bound, ms", "vanilla, ms", "share of the bound", "60 nodes, ms", "draft, ms", "c",
    "tokens/s at tau 4",
)  # fmt: skip


def collectives(sizes: Sizes, levels: int) -> tuple[int, int]:
    """How many collectives a plain step and a cycle have."""
    step = 2 * sizes.layers + 1
    return step, step + 1 + 3 * levels


def table() -> str:
    """The table of docs/lab/gpu_plan.md."""
    lines = []
    for gpus in GPUS:
        bound, step, whole = (
            TARGET.bound(TOKENS, gpus),
            plain_step(TARGET, gpus, TOKENS),
            cycle(TARGET, gpus, 6, 1, TOKENS),
        )
        tree, drafting = target_pass(TARGET, gpus, NODES, TOKENS), draft(TARGET, gpus, 6, 1, TOKENS)
        ms = bound / 1e3, step / 1e3, bound / step, tree / 1e3, drafting / 1e3
        figures = (TARGET.weight_bytes / gpus / 1e9, *ms, whole / step)
        lines.append([f"{gpus}", *(f"{figure:.2f}" for figure in figures), f"{4e6 / whole:.0f}"])
    return _markdown.table(HEADS, lines, numbers=len(HEADS))


def main() -> None:
    parser(__doc__, output=None).parse_args()
    print(table())


if __name__ == "__main__":
    main()
