"""The size of a dynamic tree with the highest goodput, which is expected tokens per second:

    goodput(size)  =  (1 + accepted(size)) / seconds(size)        size = (nodes, depth, branch); seconds of one cycle

`Acceptance` estimates `accepted`, the accepted draft tokens of a cycle, for all sizes, from trees
that were drafted and verified. A smaller tree would have kept the most valuable of the nodes that
it would have drafted, so one large tree gives an estimate for every size within it. At each depth
d, the estimate begins with the draft's own confidences:

    predicted[d]  =  sum of the values of the tree's nodes at depth d        value: product of confidences on the path

Confidences predict acceptance (EAGLE-2, figure 6) but are biased, so the probability that depth d
is accepted is taken as

    accepted[d]   =  1 - (1 - predicted[d]) ^ k[d]

with k[d] such that the averages over the trees so far agree. For sizes or levels not yet seen in
any tree, an assumed tree is used, corrected in the same way.

This module knows no clock and no method. Letters: S sizes, A branches, D depths of trees, G numbers
of nodes (A, D, G together: the grid of sizes), E depths of nodes, X nodes of a tree by value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from eyas.core.drafter import TreeSize

__all__ = ["PRIOR_CHANCE", "Acceptance", "Array", "Plan", "best", "sizes"]

MEMORY = 64  # number of trees in an average; the weight of earlier ones decays exponentially
REMEMBERED = 16  # number of trees that those of earlier processes count for
PRIOR = 3  # weight of the assumed tree, in trees
PRIOR_CHANCE = 0.7  # confidence of the first child in the assumed tree
PRIOR_RATIO = 0.2  # confidence of each further child over that of the child before it
GRID = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of nodes that are compared
BRANCHES = (1, 2, 3, 4, 6, 8, 10)  # branches that are compared

Array = np.ndarray[Any, Any]


class Plan(NamedTuple):
    """A size of tree with its expected tokens and seconds."""

    size: TreeSize
    accepted: float  # expected accepted draft tokens per cycle and row
    seconds: float  # expected seconds per cycle

    @property
    def rate(self) -> float:
        """The expected tokens per second, the bonus token included."""
        return (1 + self.accepted) / self.seconds


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


def best(all_sizes: Sequence[TreeSize], accepted_S: Array, seconds_S: Array) -> Plan:
    """Return the size with the highest goodput; the first of several.

    Args:
        accepted_S: expected accepted draft tokens of a cycle with each of `all_sizes`.
        seconds_S: expected seconds of that cycle.
    """
    place = int(((1 + accepted_S) / seconds_S).argmax())
    return Plan(all_sizes[place], float(accepted_S[place]), float(seconds_S[place]))


class Acceptance:
    """Estimates the accepted draft tokens of trees of every size, from trees that were drafted and
    verified.

    Args:
        limit: the largest tree.
        chance: of the assumed tree: the chance of the first child of a node to be the accepted one.
    """

    def __init__(self, limit: TreeSize, chance: float = PRIOR_CHANCE) -> None:
        self.limit, self.all_sizes = limit, sizes(limit)
        self.place = {size: s for s, size in enumerate(self.all_sizes)}  # index of each size in `all_sizes`
        self.branches, self.nodes = (sorted({getattr(s, name) for s in self.all_sizes}) for name in ("branch", "nodes"))
        # place of each size in the grid
        self._cell_S = tuple(np.array(x) for x in zip(*map(self._cell, self.all_sizes), strict=True))
        self._levels_E, self._nodes_G = np.arange(1, limit.depth + 1), np.array(self.nodes)
        # trees that an average is made of, MEMORY at most
        self._count_ADG = np.zeros((len(self.branches), limit.depth, len(self.nodes)))
        self._mean_ADGE = np.zeros((*self._count_ADG.shape, limit.depth))  # average of predicted[d]
        ratio = min(PRIOR_RATIO, 1 - chance)
        self._add(*_assumed_tree(limit, [chance * ratio**rank for rank in range(limit.branch)]), limit)
        self._assumed_ADGE = self._mean_ADGE.copy()
        self._count_ADG[:], self._mean_ADGE[:] = 0.0, 0.0
        self._accepted_S: Array | None = None  # the estimates; None: a tree was added since they were computed
        self._nearest = cache(self._find_nearest)
        # decaying sums over the trees, by depth: number of trees, depth accepted or not, predicted,
        # predicted by the assumed tree
        self._sums_4E = np.zeros((4, limit.depth))

    def _cell(self, size: TreeSize) -> tuple[int, int, int]:
        return self.branches.index(size.branch), size.depth - 1, self.nodes.index(size.nodes)

    @property
    def accepted_S(self) -> Array:
        """Expected accepted draft tokens of a cycle with each of `all_sizes`. A larger tree never
        yields less than a smaller one."""
        if self._accepted_S is None:
            self._accepted_S = self._expected()
        return self._accepted_S

    def _expected(self) -> Array:
        known_ADG1 = self._count_ADG[..., None] / (self._count_ADG[..., None] + PRIOR)
        seen_ADGE, assumed_ADGE = (
            1 - (1 - predicted_ADGE).clip(1e-6) ** self._exponent_E(sum_E)
            for predicted_ADGE, sum_E in ((self._mean_ADGE, self._sums_4E[2]), (self._assumed_ADGE, self._sums_4E[3]))
        )
        accepted_ADGE = np.minimum.accumulate(known_ADG1 * seen_ADGE + (1 - known_ADG1) * assumed_ADGE, axis=-1)
        accepted_ADG = accepted_ADGE.sum(-1)
        for axis in range(3):  # a larger tree never yields less than a smaller one
            accepted_ADG = np.maximum.accumulate(accepted_ADG, axis=axis)
        accepted_S: Array = accepted_ADG[self._cell_S]
        return accepted_S

    def _exponent_E(self, predicted_E: Array) -> Array:
        """Return the exponent k of each depth. With few trees it is close to the exponent of the depth before, and at
        the first depth to 1."""
        exponents, k = [], 1.0
        for trees, accepted, predicted in zip(*self._sums_4E[:2].tolist(), predicted_E.tolist(), strict=True):
            if trees:
                least = 0.5 / (trees + 1)
                accepted, predicted = (min(max(x / trees, least), 1 - least) for x in (accepted, predicted))
                k = (k + trees * math.log1p(-accepted) / math.log1p(-predicted)) / (1 + trees)
            exponents.append(k)
        return np.array(exponents)

    @property
    def sums(self) -> tuple[tuple[float, ...], ...]:
        """The record of the trees so far, by depth, for `begin_with`."""
        return tuple(tuple(row) for row in self._sums_4E.tolist())

    def begin_with(self, sums: Sequence[Sequence[float]]) -> bool:
        """Begin with the `sums` of another process, which count as REMEMBERED trees at most; return whether they fit."""
        sums_4E = np.array(sums)
        if sums_4E.shape != self._sums_4E.shape or not sums_4E[0, 0]:
            return False
        self._sums_4E[:] = sums_4E * np.minimum(1.0, REMEMBERED / np.maximum(sums_4E[0], 1e-9))
        self._accepted_S = None
        return True

    def __call__(self, size: TreeSize) -> float:
        """Return the expected accepted draft tokens of one of `all_sizes`."""
        return float(self.accepted_S[self.place[size]])

    def learn(
        self, parents: Sequence[int], values: Sequence[float], size: TreeSize, accepted: int,
        drafted: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        """Add a tree that was drafted and verified.

        Args:
            parents: parent of each node, which comes before its children; -1 for the root.
            values: log of the value of each node; 0 for the root.
            size: the size with which the tree was grown.
            accepted: draft tokens on the accepted path.
            drafted: parents and values of all nodes that the tree was selected from; None if the tree
                has all of them.
        """
        size, self._accepted_S = size.within(self.limit), None
        levels = self.limit.depth + 1
        predicted_E = np.bincount(_depths(parents), np.exp(values), minlength=levels)[1:levels]
        assumed_E = self._assumed_ADGE[self._cell(self._nearest(size))]
        new_4E = np.array([np.ones(self.limit.depth), self._levels_E <= accepted, predicted_E, assumed_E])
        self._sums_4E[:, : size.depth] *= 1 - 1 / MEMORY
        self._sums_4E[:, : size.depth] += new_4E[:, : size.depth]
        if drafted is None:
            self._add(parents, values, size)
        else:
            self._add(*drafted, size._replace(nodes=min(len(drafted[0]), self.limit.nodes)))

    def _find_nearest(self, size: TreeSize) -> TreeSize:
        """Return the largest of `all_sizes` within this one; else the smallest of all."""
        if size in self.place:
            return size
        return max(
            (s for s in self.all_sizes if s.within(size) == s),
            key=lambda s: (s.depth, s.nodes, s.branch),
            default=self.all_sizes[0],
        )

    def _add(self, parents: Sequence[int], values: Sequence[float], size: TreeSize) -> None:
        """Add the predictions of this tree to the averages of every size within it."""
        depths = _depths(parents)
        levels = [list[int]() for _ in range(1 + max(depths))]
        for n, depth in enumerate(depths):
            levels[depth].append(n)
        depth_X, value_X = np.array(depths), np.exp(np.array(values))
        # stable: a parent, which has at least the value, stays before its children
        order_X = 1 + np.argsort(-value_X[1:], kind="stable")
        depth_X, value_X = depth_X[order_X], value_X[order_X]
        predicted_XE = value_X[:, None] * (depth_X[:, None] == self._levels_E)
        nodes_G1 = self._nodes_G[self._nodes_G <= size.nodes, None]
        branches = [branch for branch in self.branches if branch <= size.branch]
        drafted_AX = np.array([_drafted_with(parents, values, levels, branch) for branch in branches])[:, order_X]
        drafted_ADX = drafted_AX[:, None] & (depth_X <= self._levels_E[: size.depth, None])
        # the best nodes; the root counts too
        kept_ADGX = drafted_ADX[:, :, None] & (drafted_ADX.cumsum(-1)[:, :, None] < nodes_G1)
        cells = (slice(0, len(branches)), slice(0, size.depth), slice(0, len(nodes_G1)))
        count_ADG, mean_ADGE = self._count_ADG[cells], self._mean_ADGE[cells]  # views, changed in place
        np.minimum(count_ADG + 1, MEMORY, out=count_ADG)
        mean_ADGE += (kept_ADGX.astype(float) @ predicted_XE - mean_ADGE) / count_ADG[..., None]


def _depths(parents: Sequence[int]) -> list[int]:
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return depth


def _drafted_with(
    parents: Sequence[int], values: Sequence[float], levels: Sequence[Sequence[int]], branch: int
) -> list[bool]:
    """Return [X]: whether a dynamic tree with this branch would have drafted each node: `branch` children of the
    `branch` best of a level."""
    drafted, children = [True] * len(parents), [0] * len(parents)
    expanded = {0}
    for level in levels[1:]:
        level_drafted = []
        for n in level:  # siblings are in order, best first
            parent = parents[n]
            drafted[n] = parent in expanded and children[parent] < branch
            children[parent] += 1
            if drafted[n]:
                level_drafted.append(n)
        expanded = set(sorted(level_drafted, key=values.__getitem__, reverse=True)[:branch])
    return drafted


def _assumed_tree(limit: TreeSize, chances: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the parents and log values of the assumed tree: the best `limit.nodes` nodes, if the children of every
    node have the same confidences."""
    parents, values, depth, waiting = [-1], [0.0], [0], list[tuple[float, int, int]]()

    def wait(parent: int, rank: int) -> None:
        if depth[parent] < limit.depth and rank < min(limit.branch, len(chances)):
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
