"""Which tree makes most tokens a second: expected yield over expected time, for every size that may be asked for.

    tokens a second  =  (1 + yield(nodes, depth, branch)) / cycle(nodes, depth, branch)

`Acceptance` learns the yield, the accepted draft tokens of a cycle, from trees that were drafted. What another tree would have had is the
best of all nodes that were drafted, kept or not, as far as it would have drafted them. The sum of their values at a depth, a value being
what the draft holds the path's probability to be, is what it promises there. Confidences foretell acceptance (EAGLE-2, figure 6) without
being it, so each depth's promises are held to what came:

    accepted  =  1 - (1 - promised) ^ k        k such that it is right on the average of the trees so far; at most 1, whatever k

Nothing is known at first: then a made-up tree speaks, which is held to what came in the same way. What was not drafted (more levels or
children, more nodes than these make) is left to it. This module knows no clock and no method.
Letters: A branches, D depths that a tree may have, E depths of nodes, G numbers of nodes, X nodes of a drafted tree, by value, S sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from eyas.drafters import Shape

__all__ = ["Acceptance", "Plan", "best", "sizes"]

GRID = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # nodes that are tried
BRANCHES = (1, 2, 3, 4, 6, 8, 10)
MEMORY = 64  # trees that an estimate remembers; earlier ones fade
PRIOR = 3  # trees that the made-up one weighs
PRIOR_CHANCE, PRIOR_SHARE = 0.7, 0.2  # of it: of a first child; of each further child of what the one before had

Array = np.ndarray[Any, Any]


class Plan(NamedTuple):
    """A size, and what is expected of it."""

    shape: Shape
    accepted: float  # draft tokens a cycle and row
    seconds: float  # of a cycle, by the costs

    @property
    def rate(self) -> float:
        """Tokens a second, of one row."""
        return (1 + self.accepted) / self.seconds


class _Tree(NamedTuple):
    """What `Acceptance.learn` is told."""

    parents: Sequence[int]
    values: Sequence[float]
    shape: Shape
    accepted: int
    drafted: tuple[Sequence[int], Sequence[float]] | None


@cache
def sizes(limit: Shape) -> tuple[Shape, ...]:
    """The trees that are tried: those that can be as deep as they may and have as many nodes as they may, none larger than `limit`."""
    nodes = [n for n in (*GRID, limit.nodes) if n <= limit.nodes]
    branches = sorted({b for b in (*BRANCHES, limit.branch) if b <= limit.branch})
    found = {
        Shape(n, d, b)
        for n in nodes
        for d in range(1, limit.depth + 1)
        for b in branches
        if d < n <= 1 + b + (d - 1) * b * b and (b < n or b == 1)
    }
    return tuple(sorted(found)) or (Shape(1, 1, 1),)


def best(shapes: Sequence[Shape], accepted_S: Array, seconds_S: Array) -> Plan:
    """The size with the highest rate, of equals the first: what each is expected to yield, and what a cycle with it takes."""
    place = int(((1 + accepted_S) / seconds_S).argmax())
    return Plan(shapes[place], float(accepted_S[place]), float(seconds_S[place]))


class Acceptance:
    """What trees of any size yield, learnt from those that were drafted."""

    def __init__(self, limit: Shape) -> None:
        self.limit, self.shapes = limit, sizes(limit)
        self.place = {shape: s for s, shape in enumerate(self.shapes)}
        self.branches, self.nodes = (sorted({getattr(s, name) for s in self.shapes}) for name in ("branch", "nodes"))
        self._cell_S = tuple(np.array(x) for x in zip(*map(self._cell, self.shapes), strict=True))
        self._levels_E, self._nodes_G = np.arange(1, limit.depth + 1), np.array(self.nodes)
        self._count_ADG = np.zeros((len(self.branches), limit.depth, len(self.nodes)))
        self._mean_ADGE = np.zeros((*self._count_ADG.shape, limit.depth))  # promised
        self._add(*_made_up(limit), limit)
        self._made_up_ADGE = self._mean_ADGE.copy()
        self._count_ADG[:], self._mean_ADGE[:] = 0.0, 0.0
        self._accepted_S: Array | None = None  # until the next tree
        self._waiting: list[_Tree] = []
        self._nearest = cache(self._find_nearest)
        self._sums_4E = np.zeros((4, limit.depth))  # over trees, faded: their number, accepted, promised, and what the made-up one promised

    def _cell(self, shape: Shape) -> tuple[int, int, int]:
        return self.branches.index(shape.branch), shape.depth - 1, self.nodes.index(shape.nodes)

    @property
    def accepted_S(self) -> Array:
        """Accepted draft tokens that a cycle with each of `shapes` is expected to yield; nothing larger yields less than what it holds."""
        if self._waiting:
            self._work_through()
        if self._accepted_S is None:
            self._accepted_S = self._expected()
        return self._accepted_S

    def _expected(self) -> Array:
        known_ADG1 = self._count_ADG[..., None] / (self._count_ADG[..., None] + PRIOR)
        seen_ADGE, guessed_ADGE = (
            1 - (1 - promised_ADGE).clip(1e-6) ** self._exponent_E(sum_E)
            for promised_ADGE, sum_E in ((self._mean_ADGE, self._sums_4E[2]), (self._made_up_ADGE, self._sums_4E[3]))
        )
        reached_ADGE = np.minimum.accumulate(known_ADG1 * seen_ADGE + (1 - known_ADG1) * guessed_ADGE, axis=-1)
        found = reached_ADGE.sum(-1)
        for axis in range(3):
            found = np.maximum.accumulate(found, axis=axis)
        here: Array = found[self._cell_S]
        return here

    def _exponent_E(self, promised_E: Array) -> Array:
        """What makes the promises right, by depth; where little is known, that of the depth above, and 1 for the first."""
        found, k = [], 1.0
        for trees, kept, promised in zip(*self._sums_4E[:2].tolist(), promised_E.tolist(), strict=True):
            if trees:
                least = 0.5 / (trees + 1)
                kept, promised = (min(max(x / trees, least), 1 - least) for x in (kept, promised))
                k = (k + trees * math.log1p(-kept) / math.log1p(-promised)) / (1 + trees)
            found.append(k)
        return np.array(found)

    def __call__(self, shape: Shape) -> float:
        """Of one of `shapes`."""
        return float(self.accepted_S[self.place[shape]])

    def learn(
        self, parents: Sequence[int], values: Sequence[float], shape: Shape, accepted: int,
        drafted: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        """A tree that was drafted and verified. It waits until somebody asks what trees yield: many at once are worked through much
        faster, as a model's pass drives all else out of the caches.

        Args:
            parents: of each node; -1 the root, a parent before its children.
            values: the log of how probable the path to each node was held to be; 0 at the root.
            shape: as which it was grown.
            accepted: draft tokens of the accepted path.
            drafted: parents and values of all nodes that it was chosen from, likewise; None: of these alone.
        """
        self._waiting.append(_Tree(parents, values, shape.within(self.limit), accepted, drafted))
        if len(self._waiting) == MEMORY:
            self._work_through()

    def _work_through(self) -> None:
        for tree in self._waiting:
            self._learn(tree)
        self._waiting, self._accepted_S = [], None

    def _learn(self, tree: _Tree) -> None:
        parents, values, shape, accepted, drafted = tree
        promised_E = np.bincount(_depths(parents), np.exp(values), minlength=self.limit.depth + 1)[1 : self.limit.depth + 1]
        foretold_E = self._made_up_ADGE[self._cell(self._nearest(shape))]
        new_4E = np.array([np.ones(self.limit.depth), self._levels_E <= accepted, promised_E, foretold_E])
        self._sums_4E[:, : shape.depth] *= 1 - 1 / MEMORY
        self._sums_4E[:, : shape.depth] += new_4E[:, : shape.depth]
        if drafted is None:
            self._add(parents, values, shape)
        else:
            self._add(*drafted, shape._replace(nodes=min(len(drafted[0]), self.limit.nodes)))

    def _find_nearest(self, shape: Shape) -> Shape:
        """The largest of `shapes` within a shape, or the smallest there is."""
        if shape in self.place:
            return shape
        return max((s for s in self.shapes if s.within(shape) == s), key=lambda s: (s.depth, s.nodes, s.branch), default=self.shapes[0])

    def _add(self, parents: Sequence[int], values: Sequence[float], shape: Shape) -> None:
        """What the tree says about every size that it holds."""
        depths = _depths(parents)
        levels = [list[int]() for _ in range(1 + max(depths))]
        for n, depth in enumerate(depths):
            levels[depth].append(n)
        depth_X, value_X = np.array(depths), np.exp(np.array(values))
        order_X = 1 + np.argsort(-value_X[1:], kind="stable")  # a parent is no less probable, and comes before its children
        depth_X, value_X = depth_X[order_X], value_X[order_X]
        promised_XE = value_X[:, None] * (depth_X[:, None] == self._levels_E)
        sizes_G1 = self._nodes_G[self._nodes_G <= shape.nodes, None]
        branches = [branch for branch in self.branches if branch <= shape.branch]
        drafted_AX = np.array([_drafted_with(parents, values, levels, branch) for branch in branches])[:, order_X]
        has_ADX = drafted_AX[:, None] & (depth_X <= self._levels_E[: shape.depth, None])
        held_ADGX = has_ADX[:, :, None] & (has_ADX.cumsum(-1)[:, :, None] < sizes_G1)
        cells = (slice(0, len(branches)), slice(0, shape.depth), slice(0, len(sizes_G1)))
        count_ADG, mean_ADGE = self._count_ADG[cells], self._mean_ADGE[cells]  # seen through these, not copied
        np.minimum(count_ADG + 1, MEMORY, out=count_ADG)
        mean_ADGE += (held_ADGX.astype(float) @ promised_XE - mean_ADGE) / count_ADG[..., None]


def _depths(parents: Sequence[int]) -> list[int]:
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def _drafted_with(parents: Sequence[int], values: Sequence[float], levels: Sequence[Sequence[int]], branch: int) -> list[bool]:
    """[X]: the nodes that growing with this branch would have drafted: `branch` children of the `branch` best nodes of each level."""
    drafted, children = [True] * len(parents), [0] * len(parents)
    expanded = {0}
    for level in levels[1:]:
        found = []
        for n in level:  # siblings stand best first
            parent = parents[n]
            drafted[n] = parent in expanded and children[parent] < branch
            children[parent] += 1
            if drafted[n]:
                found.append(n)
        expanded = set(found if len(found) <= branch else sorted(found, key=values.__getitem__, reverse=True)[:branch])
    return drafted


def _made_up(limit: Shape) -> tuple[list[int], list[float]]:
    """The best `limit.nodes` nodes of a tree whose every node has the same chances."""
    chances = [PRIOR_CHANCE * PRIOR_SHARE**rank for rank in range(limit.branch)]
    parents, values, depth, waiting = [-1], [0.0], [0], list[tuple[float, int, int]]()

    def wait(parent: int, rank: int) -> None:
        if depth[parent] < limit.depth and rank < len(chances):
            waiting.append((values[parent] + math.log(chances[rank]), -parent, rank))

    wait(0, 0)
    while waiting and len(parents) < limit.nodes:
        value, minus, rank = max(waiting)
        waiting.remove((value, minus, rank))
        parents.append(-minus)
        values.append(value)
        depth.append(depth[-minus] + 1)
        wait(-minus, rank + 1)
        wait(len(parents) - 1, 0)
    return parents, values
