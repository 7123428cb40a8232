"""The learning curve: how often a draft token is accepted, by the tokens that its head has read.

    acceptance(T)  =  limit - gap * (T / 1000) ^ -decay

Acceptance is one number for all depths: that with which a chain of drafts emits what it does emit,
1 + a + a^2 + ... tokens a cycle. The curve is fitted to heads that eyas has trained (RECORDS). The
spread of these heads around it is the uncertainty of a new head, until its own acceptance on
held-out text has been measured; then the curve is moved towards that.

Text that is read again teaches less (Muennighoff et al. 2023, arXiv 2305.16264, section 3: repeated
tokens lose their worth exponentially), which `effective_tokens` counts.

This module knows no model and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

__all__ = ["RECORDS", "Acceptance", "Curve", "Record", "acceptance_of", "effective_tokens", "fit"]

REPEATS_WORTH = 15.0  # passes after which a further one teaches 1/e of the first (R* of the paper)
DECAYS = np.arange(0.05, 1.01, 0.05)
LEAST, MOST = 0.02, 0.95  # acceptance that is believed
LEAST_DEVIATION = 0.08  # the records' targets are alike; others may differ more than these do
UNKNOWN_DEVIATION = 0.12  # for a method without records of its own


def _believe(acceptance: float) -> float:
    return min(MOST, max(LEAST, acceptance))


class Acceptance(NamedTuple):
    """An estimate of how often a draft token is accepted."""

    mean: float
    deviation: float

    def at(self, deviations: float) -> float:
        """Return the acceptance so many deviations above the mean, within what is believed."""
        return _believe(self.mean + deviations * self.deviation)


class Record(NamedTuple):
    """A head that was trained to the end of its schedule."""

    method: str
    target: str
    tokens: int  # read in training, as `effective_tokens` counts
    acceptance: float


# Heads that learned from the target's own answers; docs/guide/train.md has their trainings.
RECORDS = (
    Record("mtp", "embedded", 8_400, 0.228),
    Record("mtp", "embedded", 24_740, 0.366),
    Record("mtp", "embedded", 80_322, 0.539),
    Record("mtp", "embedded", 4_900_000, 0.780),
    Record("mtp", "nestling", 8_483, 0.157),
    Record("mtp", "nestling", 25_307, 0.320),
    Record("mtp", "nestling", 80_034, 0.547),
    Record("eagle3", "embedded", 24_740, 0.185),
    Record("eagle3", "embedded", 80_322, 0.473),
    Record("eagle3", "embedded", 6_400_000, 0.745),
    Record("eagle3", "nestling", 25_307, 0.152),
)


@dataclass(frozen=True)
class Curve:
    """A fitted curve."""

    limit: float
    gap: float
    decay: float
    deviation: float  # standard deviation of heads around the curve

    def mean(self, tokens: float) -> float:
        """Return the acceptance after so many tokens, within what is believed."""
        return _believe(self.limit - self.gap * math.pow(max(tokens, 1.0) / 1000, -self.decay))

    def after(self, tokens: float) -> Acceptance:
        """Return the estimate for a head that has read so many tokens."""
        return Acceptance(self.mean(tokens), self.deviation)

    def moved(self, tokens: float, measured: Acceptance) -> Curve:
        """Return the curve after the acceptance of the head itself was measured.

        The head's distance from the curve is taken to be the same everywhere; the estimate of it is
        the mean of what the records and the measurement say, weighted by their variances.
        """
        ours, theirs = self.deviation**2, measured.deviation**2
        share = ours / (ours + theirs)
        distance = share * (measured.mean - self.mean(tokens))
        return replace(self, limit=self.limit + distance, deviation=math.sqrt(ours * (1 - share)))


def fit(method: str, records: Sequence[Record] = RECORDS) -> Curve:
    """Return the curve through the records of a method, by least squares; through all records where
    it has fewer than four.
    """
    own = [record for record in records if record.method == method]
    chosen = own if len(own) >= 4 else list(records)
    tokens, acceptance = (np.array([getattr(r, name) for r in chosen], float) for name in ("tokens", "acceptance"))
    fits = [_with_decay(float(decay), tokens, acceptance) for decay in DECAYS]
    best = min((curve for curve in fits if curve.gap > 0), key=lambda curve: curve.deviation)
    least = LEAST_DEVIATION if chosen is own else UNKNOWN_DEVIATION
    return replace(best, deviation=max(best.deviation, least))


def _with_decay(decay: float, tokens: np.ndarray, acceptance: np.ndarray) -> Curve:
    columns = np.stack([np.ones_like(tokens), -((tokens / 1000) ** -decay)], 1)
    (limit, gap), *_ = np.linalg.lstsq(columns, acceptance)
    misses = acceptance - columns @ (limit, gap)
    freedom = max(1, len(tokens) - 3)
    return Curve(float(limit), float(gap), decay, math.sqrt(float(misses @ misses) / freedom))


def acceptance_of(tau: float, depth: int) -> float:
    """Return the acceptance with which a chain of `depth` draft tokens emits `tau` tokens a cycle."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(depth + 1)) < tau else (low, middle)
    return _believe(low)


def effective_tokens(tokens: float, passes: float) -> float:
    """Return how many tokens of new text teach as much as so many read in so many passes."""
    if passes <= 1:
        return tokens * passes
    return tokens * (1 + REPEATS_WORTH * (1 - math.exp(-(passes - 1) / REPEATS_WORTH)))
