"""The sizes of draft trees among which the fastest is looked for."""

from __future__ import annotations

from functools import cache

from eyas.core.drafter import TreeSize

GRID = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of nodes that are compared
BRANCHES = (1, 2, 3, 4, 6, 8, 10)  # branches that are compared


@cache
def sizes(limit: TreeSize) -> tuple[TreeSize, ...]:
    """Return the sizes that are compared: those within `limit` whose trees can reach their depth and their
    number of nodes."""
    nodes = [n for n in (*GRID, limit.nodes) if n <= limit.nodes]
    branches = sorted({b for b in (*BRANCHES, limit.branch) if b <= limit.branch})
    reachable = {
        TreeSize(n, d, b)
        for n in nodes
        for d in range(1, limit.depth + 1)
        for b in branches
        if d < n <= 1 + b + (d - 1) * b * b and (b < n or b == 1)
    }
    return tuple(sorted(reachable)) or (TreeSize(1, 1, 1),)
