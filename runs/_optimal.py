"""The best static tree of a size, from measured acceptance (Sequoia: Chen et al. 2024, section 3.1).

Assumption: whether the child of rank k of an accepted node at depth d is the accepted one is
chance, with a rate that depends on (d, k) alone. A tree is then expected to yield, besides
the bonus token, the sum over its nodes of the product of the rates along their paths. The best tree is found
by dynamic programming over subtrees: what a node's children of ranks k, k + 1, ... are worth at
most with n nodes.

This module knows no net, no noise and no verification: rates are counted from the trees that were
verified, whoever drafted them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from eyas.core.tree import Choices, check_choices
from eyas.errors import OptionError

__all__ = ["Counts", "count_ranks", "measuring_choices", "optimal_choices", "rates_of", "tree_value"]

# [depth of the parent][rank]; parents deeper than there are rows have the rates of the last row
Rates = Sequence[Sequence[float]]
# (how often a parent of each depth was accepted, which rank of its children was then accepted)
Counts = tuple[list[int], list[list[int]]]


def optimal_choices(rates: Rates, nodes: int, depth: int) -> Choices:
    """The static tree of `nodes` nodes, root included, at most `depth` deep, that yields most.

    Smaller only when ranks and depth hold no more nodes. Ties: fewer nodes for elder siblings.
    OptionError without room for one child.
    """
    ranks = max((len(row) for row in rates), default=0)
    if nodes < 2 or depth < 1 or not ranks:
        raise OptionError(
            f"the best tree of {nodes} nodes, {depth} deep, with {ranks} ranks is the root alone: give more of each"
        )

    @cache
    def best(d: int, rank: int, n: int) -> tuple[int, float, int]:
        """(nodes placed, their worth, size of the first subtree): the children of ranks `rank`, ...
        of a node at depth d, with n nodes.

        As many nodes as fit are placed: a node that was never accepted when rates were measured may
        be accepted later.
        """
        found: tuple[int, float, int] = (0, 0.0, 0)
        if n and d < depth and rank < len(_rates_at(rates, d)):
            for size in range(1, n + 1):
                inner, rest = best(d + 1, 0, size - 1), best(d, rank + 1, n - size)
                placed, worth = 1 + inner[0] + rest[0], _rates_at(rates, d)[rank] * (1 + inner[1]) + rest[1]
                if placed > found[0] or (placed == found[0] and worth > found[1] + 1e-12):
                    found = (placed, worth, size)
        return found

    def paths(prefix: tuple[int, ...], rank: int, n: int) -> Iterable[tuple[int, ...]]:
        size = best(len(prefix), rank, n)[2]
        if size:
            here = (*prefix, rank)
            yield here
            yield from paths(here, 0, size - 1)
            yield from paths(prefix, rank + 1, n - size)

    return check_choices(paths((), 0, nodes - 1))


def _rates_at(rates: Rates, depth: int) -> Sequence[float]:
    """The rates of the children of a node at this depth, by rank."""
    return rates[min(depth, len(rates) - 1)]


def tree_value(choices: Choices, rates: Rates) -> float:
    """Accepted draft tokens that a tree is expected to yield per cycle: tau without the bonus."""
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    for path in choices:
        worth[path] = worth[path[:-1]] * _rates_at(rates, len(path) - 1)[path[-1]]
    return sum(worth.values()) - 1.0


def count_ranks(cycles: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int, ranks: int) -> Counts:
    """Counts over cycles, for parents above `depth` that had at least `ranks` children.

    Args:
        cycles: the parents of all nodes of each cycle's tree, and the accepted path, root first.
    """
    reached, hits = [0] * depth, [[0] * ranks for _ in range(depth)]
    for parents, path in cycles:
        for d, node in enumerate(path[:depth]):
            children = [n for n, parent in enumerate(parents) if parent == node][:ranks]
            if len(children) == ranks:
                reached[d] += 1
                if d + 1 < len(path) and path[d + 1] in children:
                    hits[d][children.index(path[d + 1])] += 1
    return reached, hits


def measuring_choices(ranks: int, depth: int, inner: int) -> Choices:
    """A static tree in which `inner` nodes, those that are accepted most often as a rule, have
    `ranks` children each."""
    guess = [[0.6 * 0.4**rank for rank in range(ranks)]]
    parents = [(), *optimal_choices(guess, inner, depth - 1)] if depth > 1 and inner > 1 else [()]
    return check_choices((*parent, rank) for parent in parents for rank in range(ranks))


def rates_of(counts: Counts) -> list[list[float]]:
    """Rates by depth and rank, as far as they were reached at all."""
    return [[hit / reached for hit in row] for reached, row in zip(*counts, strict=True) if reached]
