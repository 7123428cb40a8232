"""The tests of sampled tokens: right laws pass, each kind of bias is found, and formulas agree with scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from eyas_lab.audit.arms import ARMS, Recorded, biased_law, power, sequence_power
from eyas_lab.audit.statistics import Evidence, Finding, chi_square, holm, normal, run_tests, sequence_test

TOKENS = 6000
THRESHOLD = 1e-4


def recorded(positions: int = 500, vocab: int = 12, seed: int = 0) -> Recorded:
    """Random laws along five texts."""
    p_NV = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(vocab, 0.4), positions))
    answer_N = np.arange(positions) * 5 // positions
    return Recorded(p_NV, answer_N, np.arange(positions) % (positions // 5))


def evidence(arm: str, tokens: int = TOKENS, seed: int = 1) -> Evidence:
    return recorded().drawn(arm, tokens, np.random.default_rng(seed))


def found(e: Evidence) -> dict[str, float]:
    return {test.name: test.p_value for test in run_tests(e)}


def with_cycles(e: Evidence, length: int = 4) -> Evidence:
    e.cycle = e.place // length
    return e


def test_p_values_are_those_of_scipy() -> None:
    """Guards the two formulas that stand in for scipy, which is no dependency."""
    for statistic, degrees in ((3.2, 1), (70.0, 49), (300.0, 112), (0.0, 5)):
        assert chi_square(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9)
    assert normal(-3.3) == pytest.approx(2 * stats.norm.sf(3.3), rel=1e-9)


def test_p_values_are_uniform_for_a_right_sampler() -> None:
    """Guards against a test whose false alarms are not what it says: 60 runs, all tests. A p-value below 1e-4 has a
    chance of 0.1 together, and the seed is fixed; the share below 0.05 is within four deviations."""
    p_values = [p for seed in range(60) for p in found(with_cycles(evidence("plain", 3000, seed))).values()]
    assert min(p_values) > 1e-5
    assert len(p_values) > 60 * 10
    assert abs(np.mean(np.array(p_values) < 0.05) - 0.05) < 4 * (0.05 * 0.95 / len(p_values)) ** 0.5 * 2


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        ("temperature_10", "level"),
        ("wrong_q", "uniform, rank"),
        ("read_twice", "lag 1, id"),
        ("read_twice", "repeats, 1"),
    ],
)
def test_each_bias_is_found_by_the_test_that_is_made_for_it(arm: str, name: str) -> None:
    """Guards each test: without it, its bias would pass. 30,000 tokens; the chance to miss is below 1e-3."""
    assert found(evidence(arm, 30_000))[name] < THRESHOLD
    assert found(evidence("plain", 30_000))[name] > THRESHOLD


def test_a_cycle_that_reads_the_numbers_of_the_one_before_is_found() -> None:
    """Guards the tests across borders: u of a cycle's first token is made equal to the cycle's before it."""
    e = with_cycles(evidence("plain"))
    assert min(p for name, p in found(e).items() if name.startswith("border")) > THRESHOLD
    starts = np.flatnonzero(e.place % 4 == 0)
    e.id[starts[1::2]] = e.id[starts[::2]][: len(starts[1::2])]
    assert found(e)["border, first to first, id"] < THRESHOLD


def test_answers_with_the_same_numbers_are_found() -> None:
    """Guards against seeds that the deployment ignores: every answer to a prompt is the same then."""
    e = evidence("plain")
    per_round = len(recorded().p_NK)
    for name in ("id", "token"):
        values = getattr(e, name)
        values[:] = values[np.arange(TOKENS) % per_round]
    assert found(e)["answers"] < THRESHOLD


def test_places_with_one_possible_token_tell_nothing() -> None:
    """Guards the power: u of such places is the audit's own number, and would dilute the others."""
    e = evidence("plain")
    e.top[:] = 1.0
    assert set(found(e)) == {"level", "repeats, 1", "repeats, 2"}
    e.variance[:] = 0
    assert "level" not in found(e)


def test_holm() -> None:
    """Guards the correction: step by step, and no rejection after the first that fails."""
    assert holm([0.01, 0.04, 0.03, 0.005], 0.05) == [True, False, False, True]
    assert holm([], 0.05) == []
    assert holm([0.02, 0.02], 0.05) == [True, True]


def test_the_power_of_a_wrong_temperature_is_what_theory_says() -> None:
    """Guards the simulation. To first order the level test's mean is eps sqrt(n V) where V is the variance of log p."""
    texts = recorded()
    for tokens in (1500, 6000):
        rng, z = np.random.default_rng(2), []
        for _ in range(40):
            e = texts.drawn("temperature", tokens, rng)
            z.append(e.level.sum() / e.variance.sum() ** 0.5)
        expected = -(1 - 1 / 1.05) * e.variance.sum() ** 0.5
        assert np.mean(z) == pytest.approx(expected, abs=4 / 40**0.5)
    assert power(texts, "plain", 2000, THRESHOLD) == 0.0
    assert power(texts, "wrong_q", 6000, THRESHOLD) == 1.0


def test_laws_of_the_biases() -> None:
    """Guards the arms: each is a law, plain is p, and acceptance with p / q against the true q gives p back."""
    p_NK = recorded().p_NK
    for arm in ARMS:
        law_NK = biased_law(arm, p_NK)
        assert np.allclose(law_NK.sum(-1), 1)
        assert (law_NK >= 0).all()
        assert np.allclose(law_NK, p_NK) == (arm in ("plain", "read_twice"))


def test_whole_short_answers() -> None:
    """Guards the exact law of whole answers, with answers that end early, against counts drawn from it and others."""
    law = {(0,): 0.2} | {
        (1, *rest): 0.8 * p for rest, p in zip(itertools.product((0, 1), (0, 1)), (0.4, 0.3, 0.2, 0.1), strict=True)
    }
    right = {answer: round(1000 * p) for answer, p in law.items()}
    good = sequence_test(right, law)
    assert isinstance(good, Finding)
    assert good.p_value > 0.99
    wrong = sequence_test({**right, (0,): 130, (1, 0, 0): 390}, law)
    assert wrong is not None
    assert wrong.p_value < THRESHOLD
    unknown = sequence_test({**right, (5, 5): 100}, law)  # an answer that there cannot be
    assert unknown is not None
    assert unknown.p_value < THRESHOLD
    assert sequence_power(law, "plain", 1000, THRESHOLD) == 0.0
    assert sequence_power(law, "temperature_10", 10**7, THRESHOLD) == 1.0
