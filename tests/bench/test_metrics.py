"""Figures from hand-made answers, where every number can be worked out on paper."""

from __future__ import annotations

import pytest

from eyas.bench import metrics
from eyas.bench.record import Answer, Cycle, Differs


def answer(
    method: str, prompt: str, cycles: list[tuple[int, int, float]], prefill: float = 1.0, task: str = "chat", turn: int = 0
) -> Answer:
    """cycles: (emitted, accepted, seconds) of chains of three draft tokens."""
    made = tuple(Cycle(e, a, 4, 3, 3, s, s / 4, s / 2, s / 8, 0.0) for e, a, s in cycles)
    ids = tuple(range(1 + sum(c.emitted for c in made)))
    return Answer(method, prompt, task, turn, 0.0, 5, ids, "length", prefill, made)


PLAIN = [answer("vanilla", "a", [(1, 0, 1.0)] * 6), answer("vanilla", "b", [(1, 0, 1.0)] * 2)]
FAST = [answer("fast", "a", [(4, 3, 1.5), (2, 1, 1.5)]), answer("fast", "b", [(2, 2, 1.5)])]


def test_tau_speed_and_speedup() -> None:
    """Guards the ratios: sums over sums, decoding apart from the prompt's pass, the baseline on the same prompts."""
    assert metrics.tau_of(FAST)[0] == pytest.approx(8 / 3)
    assert metrics.speed_of(FAST) == pytest.approx(8 / 4.5)
    assert metrics.speedup(FAST, PLAIN)[0] == pytest.approx((8 / 4.5) / (8 / 8))
    assert metrics.speedup(FAST, PLAIN, whole=True)[0] == pytest.approx((10 / 6.5) / (10 / 10))
    assert metrics.speedup(FAST[:1], PLAIN)[0] == pytest.approx(6 / 3)
    assert metrics.speedup(FAST, []) is None


def test_intervals_hold_the_value_and_are_paired() -> None:
    """Guards the bootstrap: prompts whose ratio is the same everywhere have no width, however their speeds differ."""
    plain = [answer("vanilla", str(i), [(1, 0, 0.1 * (i + 1))] * 4) for i in range(6)]
    twice = [answer("twice", str(i), [(2, 1, 0.1 * (i + 1))] * 2) for i in range(6)]
    value, low, high = metrics.speedup(twice, plain)
    assert (value, low, high) == pytest.approx((2, 2, 2))
    value, low, high = metrics.tau_of(FAST)
    assert low <= value <= high
    assert low < high


def test_acceptance_by_depth() -> None:
    """Guards who counts as having got there: accepted d, had a node there, and was not cut."""
    assert metrics.acceptance_by_depth(FAST, 3) == [1.0, round(2 / 3, 4), 1.0]  # b's cycle was cut behind its second draft token
    refused = [answer("x", "a", [(1, 0, 1.0), (2, 1, 1.0)])]
    assert metrics.acceptance_by_depth(refused, 4) == [0.5, 0.0, None, None]


def test_rows() -> None:
    """Guards the summary's table: pooled rows, c against vanilla's step, texts that differ are named."""
    wrong = [FAST[0].against(Differs(3, 0.5)), FAST[1]]
    table = {(r["task"], r["method"]): r for r in metrics.rows([*PLAIN, *wrong], bytes_per_step=100, bandwidth=1000.0)}
    assert set(table) == {(t, m) for t in ("chat", "all") for m in ("vanilla", "fast")}
    row = table["all", "fast"]
    assert row["c"] == pytest.approx(1.5)
    assert row["equal"] is False
    assert row["differ"] == [["a", 0, 3, 0.5]]
    assert row["R"] == pytest.approx(round(8 / 4.5, 2) * 100 / 1000, abs=1e-3)
    assert (row["drafted"], row["accepted"]) == (9, 6)
    assert table["all", "vanilla"]["speedup"] == 1.0
    assert sum(row["cycle_ms"].values()) == pytest.approx(1500, rel=1e-3)


def test_turns_stay_together() -> None:
    """Guards the unit of resampling: two turns of one prompt are one sample, so there is nothing to resample."""
    turns = [answer("x", "a", [(2, 1, 1.0)], turn=0), answer("x", "a", [(1, 0, 1.0)], turn=1)]
    assert metrics.tau_of(turns) == (1.5, 1.5, 1.5)


def test_lines_go_round() -> None:
    """Guards the file: what is written is what is read."""
    for one in (FAST[0], FAST[1].against(Differs(1, 0.25))):
        assert Answer.from_json(one.to_json()) == one
