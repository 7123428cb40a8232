"""Ratios and their intervals, from columns made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from eyas import metrics
from eyas.core.requests import Step
from eyas_lab.bench.intervals import (
    bootstrap,
    difference_of_ratios,
    mean_acceptance_length,
    ratio,
    ratio_of_ratios,
    relative_cycle_cost,
)
from steps import step


def chain(accepted: int, drafted: int = 3, cut: bool = False) -> Step:
    """A cycle of a chain."""
    tree = (range(-1, drafted), [True] * (drafted + 1))
    return step(accepted, range(accepted + 1), tree, emitted=accepted if cut else None)


def test_costs_without_anything_under_them() -> None:
    """Bug: answers of one token divide by zero."""
    assert relative_cycle_cost(6, 2, 4, 4) == 3
    assert relative_cycle_cost(6, 0, 4, 4) is relative_cycle_cost(6, 2, 0, 0) is None


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    """Guards width and place: of 60 samples with ratios about 2, the percentiles of a resampling by
    hand. 2,000 draws of each leave the ends uncertain by some 3 % of the width; a fifth of it is
    allowed. Seeded."""
    rng = np.random.default_rng(0)
    over, under = rng.integers(5, 50, 60).astype(float), rng.integers(5, 25, 60).astype(float)
    value, low, high = bootstrap(ratio, over, under)
    drawn = rng.integers(0, 60, (2000, 60))
    left, right = np.percentile(over[drawn].sum(1) / under[drawn].sum(1), [2.5, 97.5])
    assert value == pytest.approx(over.sum() / under.sum())
    assert abs(low - left) < 0.2 * (right - left)
    assert abs(high - right) < 0.2 * (right - left)
    assert bootstrap(ratio, over, under) == (value, low, high), "seeded"


def test_intervals_are_paired() -> None:
    """Bug: the columns are resampled apart, so a difference that is the same in every sample gets a
    width. Nothing but the seeded resampling is random: a false alarm is impossible."""
    rng = np.random.default_rng(1)
    cycles = rng.integers(1, 9, 50).astype(float)
    emitted = cycles * 2 + rng.integers(0, 5, 50)
    found = bootstrap(difference_of_ratios, emitted + 0.5 * cycles, cycles, emitted, cycles)
    assert found == pytest.approx((0.5, 0.5, 0.5))
    found = bootstrap(ratio_of_ratios, 2 * emitted, cycles, emitted, cycles)
    assert found == pytest.approx((2, 2, 2))
    value, low, high = bootstrap(ratio, emitted, cycles)
    assert low < value < high


def test_intervals_of_few_samples() -> None:
    """Bugs: one sample has an interval of width 0; samples without a cycle make a resample 0 / 0
    and the interval NaN, which JSON cannot hold."""
    assert bootstrap(ratio, [3], [2]) == (1.5, None, None)
    assert bootstrap(ratio, [], []) is None
    assert bootstrap(ratio, [0, 0], [0, 0]) is None
    assert bootstrap(ratio, [1], [0]) is None
    with_empty = bootstrap(ratio, [3, 0, 5, 0], [2, 0, 2, 0])
    assert with_empty == bootstrap(ratio, [3, 5], [2, 2])
    value, low, high = bootstrap(ratio_of_ratios, [3, 2], [1, 1], [1, 0], [1, 0])
    assert np.isfinite([value, low, high]).all()


def test_tau_is_cut_and_mean_acceptance_length_is_not() -> None:
    """Guards the two definitions against each other: tau counts emitted tokens of all cycles; the
    mean acceptance length counts accepted draft tokens before cutting, over cycles that drafted."""
    cut = step(1, (0, 2, 5), emitted=1, finish="stop")  # 5 was accepted, and cut off with the bonus
    plain = step(0, (0,), ((-1,), (True,)))  # nothing was drafted
    cycles = [metrics.cycle_of(s) for s in (chain(3), chain(0), plain, cut)]
    assert metrics.tau(sum(c.emitted for c in cycles), len(cycles)) == (4 + 1 + 1 + 1) / 4
    assert mean_acceptance_length(cycles) == 1 + (3 + 0 + 2) / 3
    assert mean_acceptance_length([metrics.cycle_of(plain)]) is None
