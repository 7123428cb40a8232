"""Forecast the speed-up of a head whose acceptance is uncertain: find the best tree (`speedup.py`) and compute the ends
of its interval.

This module knows no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from eyas.adaptive.cost import Costs
from eyas.core.drafter import TreeSize
from eyas.speedup import best_outcome
from eyas_train.accelerate.curve import Acceptance

__all__ = ["Forecast", "forecast"]

TAU_ERROR = 0.05  # relative error of tau, by the record that speedup.py names
COST_ERROR = 0.05  # least relative error of the cost: bench and trial are minutes apart
SPREAD_SHARE = 0.5  # deviation of a ratio of two medians of about seven timings, over their interquartile range
DEVIATIONS = 2.0  # standard deviations from the middle of an interval to its ends


@dataclass(frozen=True)
class Forecast:
    """What to expect of a head: the most likely value and the ends of the interval."""

    acceptance: float
    deviation: float  # standard deviation of the acceptance
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


def forecast(costs: Costs, limit: TreeSize, acceptance: Acceptance) -> Forecast:
    """Return what to expect of a head of this acceptance."""
    best = best_outcome(costs, limit, [acceptance.at(0)])
    error = DEVIATIONS * math.hypot(TAU_ERROR, COST_ERROR, SPREAD_SHARE * costs.spread)
    low, high = (
        max(1.0, best_outcome(costs, limit, [acceptance.at(sign * DEVIATIONS)]).drafted * (1 + sign * error))
        for sign in (-1, 1)
    )
    return Forecast(
        acceptance.at(0), acceptance.deviation, best.tree, best.tau, best.cost, best.drafted, best.speedup, low, high
    )
