"""How the minutes are split."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from eyas.errors import InputError
from eyas_train.accelerate.plan import MOST_PASSES, Plan, Speeds, batch_size, effective_tokens, heldout_share, make_plan

SPEEDS = Speeds(
    loading_seconds=2.0, rows=8, answer_rate=150.0, answer_tokens=80.0, prompt_tokens=20.0, feature_rate=1500.0, train_rate=500.0,
    plain_rate=60.0,
)  # fmt: skip


def plan(minutes: float = 30, questions: int = 10**6, **speeds: float) -> Plan:
    return make_plan(60 * minutes, replace(SPEEDS, **speeds), questions, 512)  # type: ignore[arg-type]


@pytest.mark.parametrize("minutes", [3, 10, 60, 600])
@pytest.mark.parametrize("answer_rate", [20.0, 150.0, 5000.0])
def test_all_steps_fit_the_time_and_use_it(minutes: float, answer_rate: float) -> None:
    """Bug: a share is counted twice, or a step's loading is forgotten: the run takes longer than asked,
    or leaves much of the time unused."""
    made = plan(minutes, answer_rate=answer_rate)
    assert 0.8 * 60 * minutes <= made.seconds <= 60 * minutes
    assert 4 <= made.bench_questions <= 24


def test_the_chosen_passes_teach_most() -> None:
    """Bug: the plan minimises what it should maximise. A plan with one pass more or less, made by hand
    for the same time, teaches no more."""
    made = plan()
    length = SPEEDS.conversation_tokens
    once = SPEEDS.answer_tokens / SPEEDS.answer_rate + length / SPEEDS.feature_rate
    spent = made.answers * (once + made.passes * length / SPEEDS.train_rate)
    for passes in (made.passes - 1, made.passes + 1):
        answers = int(spent / (once + passes * length / SPEEDS.train_rate))
        assert effective_tokens(answers * length, passes) <= 1.01 * effective_tokens(made.answers * length, made.passes)


def test_no_more_answers_than_questions() -> None:
    """Bug: a plan counts on questions that are not there; with few of them the time goes into passes, up to a limit."""
    made = plan(questions=100)
    assert made.answers == 100
    assert made.passes == MOST_PASSES
    assert made.trained_tokens == 100 * 100 * MOST_PASSES
    assert made.seconds < 0.5 * 60 * 30


def test_examples_are_cut_at_the_longest() -> None:
    """Bug: tokens that a training example cannot hold are counted as trained."""
    long = replace(SPEEDS, answer_tokens=2000.0)
    made = make_plan(3600, long, 50, 512)
    assert made.trained_tokens == 50 * 512 * made.passes


def test_too_little_time_is_refused_with_a_time_that_suffices() -> None:
    """Bug: the message names a time that is refused again."""
    slow = replace(SPEEDS, train_rate=5.0, plain_rate=2.0)
    with pytest.raises(InputError, match="too few to train") as refused:
        make_plan(120, slow, 1000, 512)
    found = re.search(r"at least (\d+) minutes more", str(refused.value))
    assert found
    more = int(found[1])
    assert make_plan(120 + 60 * more, slow, 1000, 512).trained_tokens > 0


def test_small_trainings_have_small_batches() -> None:
    """Bug: few tokens in large batches give a handful of updates of the weights."""
    assert batch_size(10_000, 256) == 256
    assert batch_size(10_000, 600) >= 600
    assert batch_size(10**9, 256) == 8192
    for tokens in (10**5, 10**6, 10**7):
        assert tokens / batch_size(tokens, 256) >= 150


def test_what_is_held_out() -> None:
    """Bug: nothing is held out, or much."""
    assert heldout_share(10) == 0.2
    assert heldout_share(10**6) == 0.02
    assert 15 <= 200 * heldout_share(200) <= 17


def test_repeated_text_teaches_less() -> None:
    """Bug: passes are counted like new text, and a plan reads little text very often."""
    assert effective_tokens(1000, 1) == 1000
    assert effective_tokens(1000, 0.5) == 500
    worth = [effective_tokens(1000, passes) for passes in range(1, 20)]
    gains = [after - before for before, after in pairwise(worth)]
    assert all(0 < later < earlier <= 1000 for earlier, later in pairwise(gains))
    assert effective_tokens(1000, 4) > 3_500  # Muennighoff et al.: up to four passes nearly like new text
