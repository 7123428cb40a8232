"""The size of tree with the most tokens a second: expected tokens over expected seconds, for every size.

    tokens a second  =  (1 + accepted(nodes, depth, branch)) / cycle(nodes, depth, branch)

`Acceptance` estimates the accepted draft tokens of a cycle from trees that were drafted and verified. A smaller tree would
have kept the most probable of the nodes that it would have drafted, so one large tree tells about all sizes within it. The
promise of a tree at a depth is the sum of the path probabilities q of its nodes there. Confidences foretell acceptance
(EAGLE-2, figure 6) without being equal to it, so promises are corrected at each depth, by the trees seen so far:

    accepted  =  1 - (1 - promised) ^ k        k such that the average is right; never more than 1

Before anything was drafted, and for levels and children that were not, an assumed tree takes the place of a drafted one; it is
corrected in the same way. This module knows no clock and no method.
Letters: A branches, D depths of trees, E depths of nodes, G numbers of nodes, X nodes of a tree by probability, S sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from eyas.drafters import Shape

__all__ = ["Acceptance", "Plan", "best", "sizes"]

GRID = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of nodes that are compared
BRANCHES = (1, 2, 3, 4, 6, 8, 10)
MEMORY = 64  # trees that an estimate averages over; earlier ones decay
PRIOR = 3  # trees that the assumed tree counts for
PRIOR_CHANCE = 0.7  # of the first child, in the assumed tree
PRIOR_SHARE = 0.2  # of each further child, as a share of the one before

Array = np.ndarray[Any, Any]


class Plan(NamedTuple):
    """A size of tree and its expected tokens and seconds."""

    shape: Shape
    accepted: float  # draft tokens of a cycle and row
    seconds: float  # of a cycle

    @property
    def rate(self) -> float:
        """Tokens a second of one row."""
        return (1 + self.accepted) / self.seconds


class _Tree(NamedTuple):
    """The arguments of `Acceptance.learn`."""

    parents: Sequence[int]
    values: Sequence[float]
    shape: Shape
    accepted: int
    drafted: tuple[Sequence[int], Sequence[float]] | None


@cache
def sizes(limit: Shape) -> tuple[Shape, ...]:
    """The sizes that are compared, none larger than `limit`: those that can reach their depth and their number of nodes."""
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
    """The size with the highest rate; among equals the first.

    Args:
        accepted_S: expected draft tokens of a cycle with each of `shapes`.
        seconds_S: expected seconds of that cycle.
    """
    place = int(((1 + accepted_S) / seconds_S).argmax())
    return Plan(shapes[place], float(accepted_S[place]), float(seconds_S[place]))


class Acceptance:
    """Expected accepted tokens of trees of any size, learnt from trees that were drafted and verified."""

    def __init__(self, limit: Shape) -> None:
        self.limit, self.shapes = limit, sizes(limit)
        self.place = {shape: s for s, shape in enumerate(self.shapes)}
        self.branches, self.nodes = (sorted({getattr(s, name) for s in self.shapes}) for name in ("branch", "nodes"))
        self._cell_S = tuple(np.array(x) for x in zip(*map(self._cell, self.shapes), strict=True))
        self._levels_E, self._nodes_G = np.arange(1, limit.depth + 1), np.array(self.nodes)
        self._count_ADG = np.zeros((len(self.branches), limit.depth, len(self.nodes)))
        self._mean_ADGE = np.zeros((*self._count_ADG.shape, limit.depth))  # promised
        self._add(*_assumed_tree(limit), limit)
        self._assumed_ADGE = self._mean_ADGE.copy()
        self._count_ADG[:], self._mean_ADGE[:] = 0.0, 0.0
        self._accepted_S: Array | None = None  # until the next tree
        self._waiting: list[_Tree] = []
        self._nearest = cache(self._find_nearest)
        self._sums_4E = np.zeros((4, limit.depth))  # over trees, faded: their number, accepted, promised, and what the made-up one promised

    def _cell(self, shape: Shape) -> tuple[int, int, int]:
        return self.branches.index(shape.branch), shape.depth - 1, self.nodes.index(shape.nodes)

    @property
    def accepted_S(self) -> Array:
        """Expected accepted draft tokens of a cycle with each of `shapes`. A larger tree never yields less than a smaller one."""
        if self._waiting:
            self._work_through()
        if self._accepted_S is None:
            self._accepted_S = self._expected()
        return self._accepted_S

    def _expected(self) -> Array:
        known_ADG1 = self._count_ADG[..., None] / (self._count_ADG[..., None] + PRIOR)
        seen_ADGE, guessed_ADGE = (
            1 - (1 - promised_ADGE).clip(1e-6) ** self._exponent_E(sum_E)
            for promised_ADGE, sum_E in ((self._mean_ADGE, self._sums_4E[2]), (self._assumed_ADGE, self._sums_4E[3]))
        )
        reached_ADGE = np.minimum.accumulate(known_ADG1 * seen_ADGE + (1 - known_ADG1) * guessed_ADGE, axis=-1)
        found = reached_ADGE.sum(-1)
        for axis in range(3):
            found = np.maximum.accumulate(found, axis=axis)
        here: Array = found[self._cell_S]
        return here

    def _exponent_E(self, promised_E: Array) -> Array:
        """The exponent k by depth. Where little is known it is near that of the depth above, and near 1 at the first depth."""
        found, k = [], 1.0
        for trees, kept, promised in zip(*self._sums_4E[:2].tolist(), promised_E.tolist(), strict=True):
            if trees:
                least = 0.5 / (trees + 1)
                kept, promised = (min(max(x / trees, least), 1 - least) for x in (kept, promised))
                k = (k + trees * math.log1p(-kept) / math.log1p(-promised)) / (1 + trees)
            found.append(k)
        return np.array(found)

    def __call__(self, shape: Shape) -> float:
        """Expected accepted draft tokens of one of `shapes`."""
        return float(self.accepted_S[self.place[shape]])

    def learn(
        self, parents: Sequence[int], values: Sequence[float], shape: Shape, accepted: int,
        drafted: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        """Take in a tree that was drafted and verified.

        Trees are collected and worked through when an estimate is read, which is faster, as the code is then in the caches.

        Args:
            parents: of each node; -1 the root, a parent before its children.
            values: log q of the path to each node; 0 at the root.
            shape: the size that it was grown with.
            accepted: draft tokens of the accepted path.
            drafted: parents and values of all nodes that it was chosen from; None: of these nodes.
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
        foretold_E = self._assumed_ADGE[self._cell(self._nearest(shape))]
        new_4E = np.array([np.ones(self.limit.depth), self._levels_E <= accepted, promised_E, foretold_E])
        self._sums_4E[:, : shape.depth] *= 1 - 1 / MEMORY
        self._sums_4E[:, : shape.depth] += new_4E[:, : shape.depth]
        if drafted is None:
            self._add(parents, values, shape)
        else:
            self._add(*drafted, shape._replace(nodes=min(len(drafted[0]), self.limit.nodes)))

    def _find_nearest(self, shape: Shape) -> Shape:
        """The largest of `shapes` within this one; else the smallest of all."""
        if shape in self.place:
            return shape
        return max((s for s in self.shapes if s.within(shape) == s), key=lambda s: (s.depth, s.nodes, s.branch), default=self.shapes[0])

    def _add(self, parents: Sequence[int], values: Sequence[float], shape: Shape) -> None:
        """Average the promises of every size that this tree contains."""
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
    """[X]: whether growth with this branch drafts the node: `branch` children of the `branch` best nodes of each level."""
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


def _assumed_tree(limit: Shape) -> tuple[list[int], list[float]]:
    """The assumed tree: the best `limit.nodes` nodes where all nodes have children of the same probabilities."""
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
