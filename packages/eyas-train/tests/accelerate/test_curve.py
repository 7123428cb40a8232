"""The learning curve: fitted, moved by a measurement, and what repeated text is worth."""

from __future__ import annotations

from itertools import pairwise

import pytest

from eyas_train.accelerate.curve import (
    LEAST,
    MOST,
    RECORDS,
    Acceptance,
    Curve,
    Record,
    acceptance_of,
    effective_tokens,
    fit,
)

TRUE = Curve(limit=0.9, gap=0.8, decay=0.3, deviation=0.05)
TOKENS = (3_000, 10_000, 30_000, 100_000, 1_000_000)


def test_a_curve_is_found_again_from_points_on_it() -> None:
    """Bug: thousands of tokens and tokens, or the sign of the decay, are confused in fit or use."""
    found = fit("any", [Record("any", "t", tokens, TRUE.mean(tokens)) for tokens in TOKENS])
    for tokens in (5_000, 50_000, 5_000_000):
        assert found.mean(tokens) == pytest.approx(TRUE.mean(tokens), abs=1e-6)


def test_more_training_is_never_expected_to_hurt() -> None:
    """Bug: a fit to scattered records falls with the tokens, or leaves what a rate can be."""
    for method in ("mtp", "eagle3", "a method without records"):
        curve = fit(method)
        means = [curve.after(tokens).mean for tokens in (1, 1e3, 1e4, 1e5, 1e6, 1e7, 1e9)]
        assert means == sorted(means)
        assert all(LEAST <= mean <= MOST for mean in means)


def test_a_method_without_records_is_less_certain() -> None:
    """Bug: an unknown method gets the small deviation of those that were measured."""
    assert fit("a method without records").deviation > max(fit("mtp").deviation, fit("eagle3").deviation)


def test_the_records_lie_within_two_deviations() -> None:
    """Bug: the interval of a forecast is narrower than what the heads have shown. 1 of 20 may be outside."""
    assert len({r.method for r in RECORDS}) == 2
    outside = [r for r in RECORDS if abs(fit(r.method).mean(r.tokens) - r.acceptance) > 2 * fit(r.method).deviation]
    assert len(outside) <= max(1, len(RECORDS) // 20)


def test_a_measurement_moves_the_curve() -> None:
    """Bug: what was measured is ignored, or noise is believed like a fact."""
    exact = TRUE.moved(10_000, Acceptance(0.6, 1e-6))
    assert exact.mean(10_000) == pytest.approx(0.6, abs=1e-4)
    assert exact.mean(1_000_000) > exact.mean(10_000)
    assert exact.deviation < 1e-4
    equal = TRUE.moved(10_000, Acceptance(0.6, TRUE.deviation))
    assert equal.mean(10_000) == pytest.approx((0.6 + TRUE.mean(10_000)) / 2)
    assert equal.deviation == pytest.approx(TRUE.deviation / 2**0.5)


def test_a_head_better_than_the_curve_at_its_foot_is_not_taken_for_perfect() -> None:
    """Bug: after few tokens the curve lies far below zero, and a measurement of 0.25 there moved it so
    far that 0.95 was expected of the same head a little later."""
    steep = Curve(limit=0.7, gap=2.0, decay=0.3, deviation=0.1)
    assert steep.moved(500, Acceptance(0.25, 0.01)).mean(1_000) < 0.4


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
def test_acceptance_is_found_from_tau(acceptance: float) -> None:
    """Bug: the depth of the chain is off by one."""
    tau = 1 + acceptance + acceptance**2 + acceptance**3
    assert acceptance_of(tau, 3) == pytest.approx(acceptance, abs=1e-6)


def test_repeated_text_teaches_less() -> None:
    """Bug: passes are counted like new text, and a plan reads little text very often."""
    assert effective_tokens(1000, 1) == 1000
    assert effective_tokens(1000, 0.5) == 500
    worth = [effective_tokens(1000, passes) for passes in range(1, 20)]
    gains = [after - before for before, after in pairwise(worth)]
    assert all(0 < later < earlier <= 1000 for earlier, later in pairwise(gains))
    assert effective_tokens(1000, 4) > 3_500  # Muennighoff et al.: up to four passes nearly like new text
