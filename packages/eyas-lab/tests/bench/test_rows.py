"""Figures from hand-made steps and answers, where every number can be worked out on paper, and their intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from eyas.core.engine import Step
from eyas.core.tree import Draft
from eyas.hardware.machine import Used
from eyas_lab.bench import rows as table_of
from eyas_lab.bench.intervals import bootstrap, mean_acceptance_length, ratio, ratio_of_ratios
from eyas_lab.bench.record import Answer, Differs, Memory, answer_from
from eyas_lab.metrics import Cycle, cycle_of
from steps import step

ABOUT = {"method": "x", "prompt": "a", "task": "chat", "turn": 0, "temperature": 0.0, "prompt_tokens": 5}


def answered(*steps: Step, seconds: float = 1.0) -> Answer:
    """The prompt's own token in two seconds, then these."""
    first = Step(1, (7,), None)
    return answer_from([(first, 2.0), *((s, seconds) for s in steps)], **ABOUT)


def answer(
    method: str, prompt: str, cycles: list[tuple[int, int, float]], prefill: float = 1.0, task: str = "chat", turn: int = 0
) -> Answer:  # fmt: skip
    """cycles: (emitted, accepted, seconds), each of a chain of three draft tokens."""
    made = tuple(Cycle(e, a, s, 4, 3, min(a + (e > a), 3), s / 4, s / 2, s / 8, 0.0) for e, a, s in cycles)
    ids = tuple(range(1 + sum(c.emitted for c in made)))
    return Answer(method, prompt, task, turn, 0.0, 5, ids, "length", prefill, made)


PLAIN = [answer("vanilla", "a", [(1, 0, 1.0)] * 6), answer("vanilla", "b", [(1, 0, 1.0)] * 2)]
FAST = [answer("fast", "a", [(4, 3, 1.5), (2, 1, 1.5)]), answer("fast", "b", [(2, 2, 1.5)])]


def test_what_a_step_is_worth() -> None:
    """Bugs: padding counts as drafted, the prompt's token as a cycle's, or the seconds are the
    step's own instead of the clock's."""
    made = answered(step(1, (0, 2)), step(2, (0, 1, 3), finish="length"), seconds=0.8)
    assert made.token_ids == (7, 0, 1, 0, 1, 2)
    assert (made.emitted, made.prefill_seconds, made.decode_seconds, made.seconds) == pytest.approx((5, 2.0, 1.6, 3.6))
    assert [(c.emitted, c.accepted, c.nodes, c.candidates) for c in made.cycles] == [(2, 1, 7, 5), (3, 2, 7, 5)]
    assert made.finish == "length"
    assert table_of.tau_of([made]) == (2.5, None, None)
    cut, undrafted = step(1, (0, 2, 5), emitted=1, finish="stop"), step(0, (0,), ((-1,), (True,)))
    cycles = [cycle_of(one) for one in (step(1, (0, 2)), undrafted, cut)]  # 5 was accepted, and cut off with the bonus
    assert mean_acceptance_length(cycles) == 1 + (1 + 2) / 2
    assert mean_acceptance_length([cycle_of(undrafted)]) is None


def test_drawn_trees_are_not_compared_when_sampled() -> None:
    """Bug: at a temperature a sampled tree's ids, another draw from the same law, are held against
    it; or nobody's are compared."""
    one = step(0, (0,), finish="length")
    drawn = Step(**{**vars(one), "draft": Draft(one.draft.tree, one.draft.tokens_BN, q_BNV=torch.ones(1, 7, 8))})  # type: ignore[union-attr]
    first = (Step(1, (7,), None), 1.0)
    for given, temperature, comparable in ((one, 1.0, True), (drawn, 1.0, False), (drawn, 0.0, True)):
        assert answer_from([first, (given, 1.0)], **{**ABOUT, "temperature": temperature}).comparable is comparable


def test_tau_speed_and_speedup() -> None:
    """Guards the ratios: sums over sums, decoding apart from the prompt's pass, the baseline on the
    same prompts; the unit of resampling is a prompt with its turns, and the two sides are resampled together."""
    assert table_of.tau_of(FAST)[0] == pytest.approx(8 / 3)
    assert table_of.speed_of(FAST) == pytest.approx(8 / 4.5)
    assert table_of.speedup(FAST, PLAIN)[0] == pytest.approx((8 / 4.5) / (8 / 8))
    assert table_of.speedup(FAST, PLAIN, whole=True)[0] == pytest.approx((10 / 6.5) / (10 / 10))
    assert table_of.speedup(FAST[:1], PLAIN)[0] == pytest.approx(6 / 3)
    assert table_of.speedup(FAST, []) is None
    value, low, high = table_of.tau_of(FAST)
    assert low < value < high
    turns = [answer("x", "a", [(2, 1, 1.0)], turn=0), answer("x", "a", [(1, 0, 1.0)], turn=1)]
    assert table_of.tau_of(turns) == (1.5, None, None)
    plain = [answer("vanilla", str(i), [(1, 0, 0.1 * (i + 1))] * 4) for i in range(6)]
    twice = [answer("twice", str(i), [(2, 1, 0.1 * (i + 1))] * 2) for i in range(6)]
    assert table_of.speedup(twice, plain) == pytest.approx((2, 2, 2))
    assert (table_of.utilisation(20.0, 100, 1000.0), table_of.utilisation(20.0, 100, None)) == (2.0, None)


def test_prompts_without_a_cycle() -> None:
    """Bug: answers of one token make a resample's fraction 0 / 0, and the interval NaN, which JSON cannot hold."""
    empty = [answer(m, f"e{i}", []) for m in ("fast", "vanilla") for i in range(6)]
    fast, plain = [*FAST, *empty[:6]], [*PLAIN, *empty[6:]]
    assert table_of.tau_of(fast) == table_of.tau_of(FAST)
    assert table_of.speedup(fast, plain) == table_of.speedup(FAST, PLAIN)
    assert table_of.tau_of(empty) is None
    assert table_of.speed_of(empty) == 0
    row = table_of.rows(empty, 1)[-1]
    assert row["tau"] is row["speedup"] is row["c"] is None


def test_stage_ms() -> None:
    """Guards the host's share: what the stages leave of the whole cycle; a library that tells nothing has no split."""
    assert table_of.stage_ms(answered(step(0, (0,), finish="stop"), seconds=1.0).cycles) == pytest.approx(
        {"draft": 100, "target": 400, "verify": 200, "commit": 100, "host": 200}
    )
    assert table_of.stage_ms((Cycle(1, 0, 1.0),)) == {}


def found(answers: list[Answer], *about: Any, **more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a table by task and method."""
    return {(row["task"], row["method"]): row for row in table_of.rows(answers, *about, **more)}


def test_rows() -> None:
    """Guards the summary's table: pooled rows, texts that differ are named, sums, medians, memory,
    what a library does not tell; a speed-up is tau over c."""
    first, second = FAST
    fast = [first.replace(differs=Differs(3, 0.5), memory=Memory(900, 90)),
            second.replace(memory=Memory(950, 70), prefill_seconds=3.0)]  # fmt: skip
    cycles = [tuple(Cycle(c.emitted, 0, 2.0) for c in a.cycles) for a in PLAIN]
    theirs = [a.replace(method="transformers", cycles=c) for a, c in zip(PLAIN, cycles, strict=True)]
    table = found([*PLAIN, *theirs, *fast], bytes_per_step=100, bandwidth=1000.0)
    assert set(table) == {(t, m) for t in ("chat", "all") for m in ("vanilla", "transformers", "fast")}
    row = table["all", "fast"]
    assert (row["equal"], row["differ"]) == (False, [["a", 0, 3, 0.5]])
    assert row["R"] == pytest.approx(round(8 / 4.5, 2) * 100 / 1000, abs=1e-3)
    sums = {"prompts": 2, "tokens": 10, "cycles": 3, "nodes": 4.0, "drafted": 9, "accepted": 6}
    assert {name: row[name] for name in sums} == sums
    assert row["c"] == pytest.approx(1.5)
    assert row["speedup"] == pytest.approx(row["tau"] / row["c"], abs=1e-3)
    assert row["speedup_vs_transformers"] == pytest.approx((8 / 4.5) / (8 / 16), abs=1e-4)
    assert (row["first_token_ms"], row["memory_bytes"]) == (2000, 90)
    assert (table["all", "vanilla"]["speedup"], table["all", "vanilla"]["memory_bytes"]) == (1.0, None)
    assert sum(row["cycle_ms"].values()) == pytest.approx(1500, rel=1e-3)
    other = table["all", "transformers"]
    assert (other["drafted"], other["nodes"], other["acceptance_by_depth"], other["cycle_ms"]) == (None, None, [], {})


def test_pooling_is_over_prompts() -> None:
    """Bug: tasks or temperatures leak into each other, or a task's mean is pooled instead of its prompts."""
    slow = answer("fast", "c", [(1, 0, 3.0)] * 4, task="maths")
    rows = {(r["temperature"], r["task"]): r for r in table_of.rows([*FAST, slow, slow.replace(temperature=1.0)], 1)}
    assert {key: r["tau"] for key, r in rows.items()} == {
        (0.0, "chat"): round(8 / 3, 4), (0.0, "maths"): 1.0, (0.0, "all"): round(12 / 7, 4), (1.0, "maths"): 1.0, (1.0, "all"): 1.0
    }  # fmt: skip


def test_lines_go_round() -> None:
    """Guards the file: what is written is what is read; a line of another version is an error of its own."""
    full = FAST[1].replace(differs=Differs(1, None), memory=Memory(5, None), around=Used(3.0, None), turns=2)
    for one in (FAST[0], full):
        assert Answer.from_json(one.to_json()) == one
    for found in ({**full.to_json(), "cycles": [[1] * 12]}, {k: v for k, v in full.to_json().items() if k != "around"}):
        with pytest.raises((TypeError, KeyError)):
            Answer.from_json(found)
    assert not any(math.isnan(x) for x in full.to_json()["cycles"][0] if x is not None)


def test_a_contestant_that_failed_is_a_row_without_figures() -> None:
    """Bug: the prompts that a contestant answered before it failed make figures that are compared with whole ones."""
    error = "ValueError: no"
    failed = FAST[1].replace(token_ids=(), cycles=(), finish="failed", comparable=False, error=error)
    row = found([*PLAIN, FAST[0], failed], 1, 1.0)["all", "fast"]
    assert (row["error"], row["prompts"], row["tokens"], row["cycles"]) == (error, 2, 0, 0)
    assert row["tau"] is row["speedup"] is row["tokens_per_second"] is row["equal"] is row["R"] is None
    assert Answer.from_json(failed.to_json()) == failed


def test_the_interval_is_that_of_a_plain_bootstrap() -> None:
    """Guards width and place: of 60 samples with ratios about 2, the percentiles of a resampling by hand. 2,000 draws
    of each leave the ends uncertain by some 3 % of the width; a fifth of it is allowed. Seeded."""
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
