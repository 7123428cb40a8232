"""From the acceptance of a head and the costs of this machine to the speed-up of the best tree.

    speed-up  =  max over trees of  tau(tree) / c(tree)         c: seconds of a cycle over those of plain decoding

tau of every size of tree follows from one number, the acceptance a of a first child: the child of
rank r (0, 1, ...) at any node is the accepted one with the chance a (SIBLING (1 - a))^r, as if each
further child took nearly the same share of what those before it left. On the trees of
docs/results.md (three sizes, eight heads) this gives tau within 5 % (root mean square).

Where no tree pays, `--tree auto` decodes plainly, and the speed-up is 1.

This module knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np

from eyas.accelerate.curve import Acceptance
from eyas.adaptive import goodput
from eyas.adaptive.cost import Costs
from eyas.core.drafter import TreeSize
from eyas.metrics import relative_cycle_cost

__all__ = ["Forecast", "Outcome", "forecast", "outcome"]

SIBLING = 0.8
TAU_ERROR = 0.05  # of tau, by the record above
COST_ERROR = 0.05  # of c, at least: bench and trial are minutes apart
SPREAD_SHARE = 0.5  # deviation of a ratio of two medians of about seven timings, over their interquartile range
DEVIATIONS = 2.0  # of an interval's ends from its middle


@dataclass(frozen=True)
class Outcome:
    """The best tree for an acceptance."""

    tree: TreeSize
    tau: float
    cost: float  # c
    drafted: float  # tau / c: the speed-up where every cycle drafts this tree

    @property
    def speedup(self) -> float:
        """The speed-up of `--tree auto`, which need not draft."""
        return max(1.0, self.drafted)


@dataclass(frozen=True)
class Forecast:
    """What to expect of a head: the most likely value and the ends of the interval."""

    acceptance: float
    deviation: float  # of the acceptance
    tree: TreeSize
    tau: float
    cost: float
    drafted: float  # the speed-up where every cycle drafts
    speedup: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Return it as `json` writes it."""
        rounded = {name: round(value, 4) for name, value in asdict(self).items() if isinstance(value, float)}
        return {**rounded, "tree": list(self.tree)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the forecast that `to_json` described."""
        return cls(**{**fields, "tree": TreeSize(*fields["tree"])})


def outcome(costs: Costs, limit: TreeSize, acceptance: float) -> Outcome:
    """Return the tree within `limit` that makes most tokens a second."""
    sizes, accepted_S = _accepted(limit, acceptance)
    plain = costs.plain()
    seconds_S = np.array([max(plain, costs.cycle(size)) for size in sizes])  # less is noise: it does a plain one's work
    plan = goodput.best(sizes, accepted_S, seconds_S)
    cost = relative_cycle_cost(plan.seconds, 1, plain, 1)
    assert cost is not None
    return Outcome(plan.size, 1 + plan.accepted, cost, (1 + plan.accepted) / cost)


@lru_cache(maxsize=32)
def _accepted(limit: TreeSize, acceptance: float) -> tuple[tuple[TreeSize, ...], goodput.Array]:
    """All sizes, and the draft tokens of a cycle that are accepted with each of them."""
    chances = [acceptance * (SIBLING * (1 - acceptance)) ** rank for rank in range(limit.branch)]
    expected = goodput.Acceptance(limit, chances)
    return expected.all_sizes, expected.accepted_S


def forecast(costs: Costs, limit: TreeSize, acceptance: Acceptance) -> Forecast:
    """Return what to expect of a head of this acceptance."""
    best = outcome(costs, limit, acceptance.at(0))
    error = DEVIATIONS * math.hypot(TAU_ERROR, COST_ERROR, SPREAD_SHARE * costs.spread)
    low, high = (
        max(1.0, outcome(costs, limit, acceptance.at(sign * DEVIATIONS)).drafted * (1 + sign * error))
        for sign in (-1, 1)
    )
    return Forecast(
        acceptance.at(0), acceptance.deviation, best.tree, best.tau, best.cost, best.drafted, best.speedup, low, high
    )
