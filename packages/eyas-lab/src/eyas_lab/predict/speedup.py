"""From the acceptance of a head and the costs of a machine to the speed-up of the best tree.

    speed-up  =  max over trees of  tau(tree) / c(tree)         c: seconds of a cycle over those of plain decoding

tau of every size of tree follows from the acceptance by depth. At any node of depth d the child of rank r (0,
1, ...) is accepted with the chance a_d (SIBLING (1 - a_d))^r. Each further child then takes nearly the same
share of the rest. On the trees of docs/lab/results.md (three sizes, eight heads) one a for all depths gives
tau within 5 % (root mean square).

Where no tree pays, `--tree auto` decodes plainly, and the speed-up is 1.

This module knows no clock: costs are measured (`eyas.adaptive.cost`) or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from eyas.adaptive.goodput import sizes
from eyas.core.drafter import TreeSize

__all__ = ["SIBLING", "CycleCosts", "Outcome", "outcomes", "tau_of"]

SIBLING = 0.8


class CycleCosts(Protocol):
    """Seconds of cycles."""

    def plain(self) -> float:
        """Return the seconds of a cycle without a draft."""
        ...

    def cycle(self, size: TreeSize) -> float:
        """Return the seconds of a cycle with a tree of this size."""
        ...


@dataclass(frozen=True)
class Outcome:
    """Expected tau, cost and speed-up of one tree."""

    tree: TreeSize
    tau: float
    cost: float  # c
    drafted: float  # tau / c: the speed-up where every cycle drafts this tree

    @property
    def speedup(self) -> float:
        """The speed-up of `--tree auto`, which need not draft."""
        return max(1.0, self.drafted)


def outcomes(costs: CycleCosts, limit: TreeSize, acceptance: Sequence[float]) -> list[Outcome]:
    """Return what to expect of each size within `limit`.

    Args:
        acceptance: of a first child at depth 1, 2, ...; the last one holds for all deeper ones.
    """
    plain, found = costs.plain(), []
    for size in sizes(limit):
        cost = max(plain, costs.cycle(size)) / plain  # less is noise: a cycle with a draft does a plain one's work
        tau = tau_of(size, acceptance)
        found.append(Outcome(size, tau, cost, tau / cost))
    return found


def tau_of(size: TreeSize, acceptance: Sequence[float]) -> float:
    """Return the expected tokens of a cycle with a dynamic tree of this size."""
    return 1 + sum(_values(size.depth, size.branch, tuple(acceptance))[: size.nodes - 1])


@lru_cache(maxsize=1024)
def _values(depth: int, branch: int, acceptance: tuple[float, ...]) -> list[float]:
    """Return the chance of each drafted node to be accepted, largest first. Each level has `branch` children of
    the `branch` best nodes of the preceding level."""
    drafted, level = list[float](), [1.0]
    for d in range(depth):
        first = acceptance[min(d, len(acceptance) - 1)]
        chances = [first * (SIBLING * (1 - first)) ** rank for rank in range(branch)]
        level = sorted((value * chance for value in level[:branch] for chance in chances), reverse=True)
        drafted += level
    return sorted(drafted, reverse=True)
