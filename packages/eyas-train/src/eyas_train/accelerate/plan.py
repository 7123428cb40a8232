"""The plan for the minutes of a run: the steps, their size, and their time.

    total  =  loading + measuring + answers + features + training + bench

The bench gets a fixed share. The rest goes to answers, features and training, with the number of passes over
the answers that teaches most (`effective_tokens`). Passes are few where answers are cheap, and more where they
are slow or the questions are used up. Text that is read again teaches less (Muennighoff et al. 2023, section 3:
repeated tokens lose their worth exponentially). Pure arithmetic: this module knows no model, no clock and no
file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from eyas.errors import InputError

FEWEST_QUESTIONS = 16  # fewest that a run can do with: some are for the bench, some are held out
MOST_BENCH_QUESTIONS = 24
MOST_PASSES = 16
REPEATS_WORTH = 15.0  # passes after which a further one teaches 1/e of the first (R* of arXiv 2305.16264)
STEPS = (20, 150)  # fewest updates of the weights, and their number from which on batches grow


@dataclass(frozen=True)
class Speeds:
    """Measurements on this machine."""

    loading_seconds: float  # loading the target once
    rows: int  # conversations that are answered at a time
    answer_rate: float  # tokens per second of all rows
    answer_tokens: float  # mean tokens of a conversation's answers
    prompt_tokens: float  # mean tokens of the rest of a conversation
    feature_rate: float  # tokens per second
    train_rate: float  # tokens per second
    plain_rate: float  # tokens per second of plain decoding, one row

    @property
    def conversation_tokens(self) -> float:
        """Tokens of a conversation."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class Plan:
    """The split. Seconds of a step include loading the target for it."""

    answers: int
    passes: int
    trained_tokens: int  # all passes together
    answer_seconds: float
    feature_seconds: float
    training_seconds: float
    bench_seconds: float
    bench_questions: int
    bench_tokens: int  # most tokens of an answer in the bench

    @property
    def seconds(self) -> float:
        """All steps together."""
        return self.answer_seconds + self.feature_seconds + self.training_seconds + self.bench_seconds


@dataclass(frozen=True)
class Prospect:
    """A method, with the plan of its run."""

    method: str
    target: str
    max_length: int  # tokens of a training example
    max_new_tokens: int  # most tokens of an answer
    speeds: Speeds
    plan: Plan

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the prospect of which `fields` is the dictionary."""
        return cls(**{**fields, "speeds": Speeds(**fields["speeds"]), "plan": Plan(**fields["plan"])})


def make_plan(seconds: float, speeds: Speeds, questions: int, max_length: int) -> Plan:
    """Return the split of so many seconds.

    Args:
        questions: how many there are to be answered, without the bench's.
        max_length: most tokens of a training example.

    Raises:
        InputError: there is too little time for a training; the message says how much is needed.
    """
    plan = _split(seconds, speeds, questions, max_length)
    if plan is not None:
        return plan
    minutes, week = math.ceil(seconds / 60), 60 * 24 * 7
    while minutes < week and _split(60.0 * minutes, speeds, questions, max_length) is None:
        minutes = math.ceil(1.2 * minutes) + 1
    raise InputError(
        f"{seconds / 60:.1f} minutes are left, too few to train a head of this model on this machine: "
        f"give at least {minutes} minutes more"
    )


def _split(seconds: float, speeds: Speeds, questions: int, max_length: int) -> Plan | None:
    """Return the split; None where it leaves fewer than STEPS[0] updates of the weights."""
    bench_questions, bench_tokens, bench_seconds = _bench(seconds, speeds)
    rest = seconds - bench_seconds - 2 * speeds.loading_seconds  # the bench's own is in its seconds
    if rest <= 0:
        return None
    length = min(speeds.conversation_tokens, max_length)
    once = speeds.answer_tokens / speeds.answer_rate + length / speeds.feature_rate

    def affordable(passes: int) -> int:
        return min(questions, int(rest / (once + passes * length / speeds.train_rate)))

    passes = max(range(1, MOST_PASSES + 1), key=lambda n: effective_tokens(affordable(n) * length, n))
    answers = affordable(passes)
    tokens = int(answers * length * passes)
    if tokens < STEPS[0] * batch_size(tokens, max_length):
        return None
    return Plan(
        answers=answers,
        passes=passes,
        trained_tokens=tokens,
        answer_seconds=speeds.loading_seconds + answers * speeds.answer_tokens / speeds.answer_rate,
        feature_seconds=speeds.loading_seconds + answers * length / speeds.feature_rate,
        training_seconds=tokens / speeds.train_rate,
        bench_seconds=bench_seconds,
        bench_questions=bench_questions,
        bench_tokens=bench_tokens,
    )


def _bench(seconds: float, speeds: Speeds) -> tuple[int, int, float]:
    """Return (questions, tokens of an answer, seconds): every question is answered plainly and drafted, and the first
    one once more to warm up. Costs of the new head's trees take some seconds more."""
    extra = 15.0
    room = min(300.0, 0.12 * seconds) - extra
    tokens = int(min(128, max(32, room * speeds.plain_rate / 2 / 8)))
    each = 2 * min(tokens, speeds.answer_tokens) / speeds.plain_rate
    count = int(min(MOST_BENCH_QUESTIONS, max(4, room / each)))
    return count, tokens, extra + speeds.loading_seconds + (count + 1) * each


def effective_tokens(tokens: float, passes: float) -> float:
    """Return the number of new tokens worth `tokens` tokens read `passes` times."""
    if passes <= 1:
        return tokens * passes
    return tokens * (1 + REPEATS_WORTH * (1 - math.exp(-(passes - 1) / REPEATS_WORTH)))


def batch_size(tokens: float, max_length: int) -> int:
    """Return the tokens of a batch: small ones where there are few, so that there are enough updates
    of the weights, but at least one example."""
    size = max(256, max_length)
    while 2 * size <= 8192 and 2 * size * STEPS[1] <= tokens:
        size *= 2
    return size


def heldout_share(conversations: int) -> float:
    """Return the share of the answers that is kept for evaluations: about sixteen conversations."""
    return min(0.2, max(0.02, 16 / max(1, conversations)))
