"""Whether new weights draft as well as old ones: both draft by turns, and their accepted lengths are compared.

    block     0    1    2    3    4    5   ...     BLOCK cycles each
    weights   old  new  new  old  old  new         ABBA
    pair      [  0   ] [  1   ] [  2   ]           its difference: mean tokens per cycle, new minus old

The two blocks of a pair follow each other. So they draft for the same texts, with trees of the same size, and a
change of the traffic moves both. The differences of pairs are nearly independent, so the error of their mean is
their standard deviation / sqrt(pairs), and no model of the text is needed.

The new weights are worse if the mean difference is below -LIMIT standard errors. That is looked at after each pair
from MIN_PAIRS on: with equal weights a false alarm comes in about 3 of 100 trials (tests/adapt/test_guard.py counts
them). They are kept as soon as they are better by the same rule, and after MAX_PAIRS without an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

BLOCK = 8  # cycles
MIN_PAIRS, MAX_PAIRS = 6, 16
LIMIT = 3.0  # standard errors
OLD, NEW = 0, 1
ORDER = (OLD, NEW, NEW, OLD)


class PairedTrial:
    """One comparison of old and new weights."""

    def __init__(self) -> None:
        self.cycles = 0
        self.blocks: list[float] = []  # the mean length of each complete block
        self.differences: list[float] = []
        self._sum = 0.0

    @property
    def arm(self) -> int:
        """Return which weights draft in the next cycle: OLD or NEW."""
        return ORDER[self.cycles // BLOCK % len(ORDER)]

    def count(self, lengths: Sequence[int]) -> None:
        """Count a cycle, with the tokens that each row has got."""
        self._sum += sum(lengths) / len(lengths)
        self.cycles += 1
        if self.cycles % BLOCK:
            return
        self.blocks.append(self._sum / BLOCK)
        self._sum = 0.0
        if len(self.blocks) % 2 == 0:
            first, second = self.blocks[-2:]
            was_new_first = ORDER[(len(self.blocks) - 2) % len(ORDER)] == NEW
            self.differences.append(first - second if was_new_first else second - first)

    @property
    def mean(self) -> float:
        """The mean difference; 0 without pairs."""
        return fmean(self.differences) if self.differences else 0.0

    @property
    def limit(self) -> float:
        """The size of a mean difference that says something; infinite where nothing is known."""
        n = len(self.differences)
        return LIMIT * stdev(self.differences) / math.sqrt(n) if n >= MIN_PAIRS else math.inf

    @property
    def is_worse(self) -> bool:
        """Whether the new head accepts significantly less."""
        return self.mean < -self.limit

    @property
    def is_over(self) -> bool:
        """Whether the new weights have drafted long enough: they are better, or there was no alarm."""
        return self.mean > self.limit or len(self.differences) >= MAX_PAIRS
