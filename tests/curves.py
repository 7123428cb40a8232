"""Machines and trees that are made up, for tests of what is planned on them."""

import random

import numpy as np

from eyas.adaptive.cost import Costs
from eyas.drafters import TreeSize

LIMIT = TreeSize(32, 5, 4)


def curve(node: float, level: float) -> Costs:
    """A pass takes 1 for the first node and `node` for each further; a level of the draft `level`."""
    nodes = (1, 2, 4, 8, 16, 32, 64)
    return Costs(256, nodes, tuple(1 + node * (n - 1) for n in nodes), (1, 4), (level, level), (level, level), 0.0, 0.0)


def drafted(seed: int, limit: TreeSize = LIMIT) -> tuple[list[int], list[float]]:
    """A tree as `grow_dynamic` grows it at that limit, from chances that are drawn: (parents, values)."""
    dice = random.Random(seed)
    everything: list[tuple[int, float, int]] = []  # (place of the parent, value, depth)
    level = [(-1, 0.0)]
    for depth in range(1, limit.depth + 1):
        here = []
        for place, value in level:
            rest = 1.0
            chances = []
            for _ in range(limit.branch):
                chances.append(rest * dice.uniform(0.2, 0.9))
                rest -= chances[-1]
            for chance in sorted(chances, reverse=True):
                here.append((len(everything), value + float(np.log(chance))))
                everything.append((place, value + float(np.log(chance)), depth))
        level = sorted(here, key=lambda x: -x[1])[: limit.branch]
    kept = sorted(sorted(range(len(everything)), key=lambda i: (-everything[i][1], i))[: limit.nodes - 1])
    number = {-1: 0} | {place: n for n, place in enumerate(kept, start=1)}
    return [-1, *(number[everything[i][0]] for i in kept)], [0.0, *(everything[i][1] for i in kept)]
