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

from eyas.errors import InputError

__all__ = ["FEWEST_QUESTIONS", "Plan", "Speeds", "effective_tokens", "heldout_share", "make_plan", "training_tokens"]

FEWEST_QUESTIONS = 16  # fewest that a run can do with: some are for the bench, some are held out
BENCH_SHARE, MOST_BENCH_SECONDS = 0.12, 300.0
BENCH_QUESTIONS = (4, 24)  # fewest and most questions of the bench
BENCH_TOKENS = (32, 128)  # fewest and most tokens of an answer
BENCH_EXTRA_SECONDS = 15.0  # costs of the head that was trained, bandwidth, pictures
MOST_PASSES = 16
REPEATS_WORTH = 15.0  # passes after which a further one teaches 1/e of the first (R* of arXiv 2305.16264)
STEPS = (20, 150)  # fewest updates of the weights, and their number from which on batches grow
BATCH_TOKENS = (256, 8192)
EVALUATIONS, EVALUATION_SHARE = 3, 0.1  # during a training, and the share of its time
EVALUATION_TOKENS = 32  # tokens of an answer in an evaluation
EVALUATION_PROMPTS = (2, 16)
HELDOUT_CONVERSATIONS = 16
LONGEST_MINUTES = 60 * 24 * 7


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
    chain_pass_seconds: float  # a pass over a short chain, by the target's own forward
    plain_rate: float  # tokens per second of plain decoding, one row

    @property
    def conversation_tokens(self) -> float:
        """Tokens of a conversation."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def evaluated_train_rate(self) -> float:
        """Tokens per second of a training with its evaluations."""
        return self.train_rate * (1 - EVALUATION_SHARE)


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
    batch_tokens: int

    @property
    def seconds(self) -> float:
        """All steps together."""
        return self.answer_seconds + self.feature_seconds + self.training_seconds + self.bench_seconds

    @property
    def effective_tokens(self) -> float:
        """Tokens of new text that teach as much."""
        return effective_tokens(self.trained_tokens / self.passes, self.passes)


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
    minutes = math.ceil(seconds / 60)
    while minutes < LONGEST_MINUTES and _split(60.0 * minutes, speeds, questions, max_length) is None:
        minutes = math.ceil(1.2 * minutes) + 1
    raise InputError(
        f"{seconds / 60:.1f} minutes are left, too few to train a head of this model on this machine: "
        f"give at least {minutes} minutes more"
    )


def _split(seconds: float, speeds: Speeds, questions: int, max_length: int) -> Plan | None:
    """Return the split; None where it leaves fewer than STEPS[0] updates of the weights."""
    bench_count, bench_tokens, bench_seconds = _bench(seconds, speeds)
    rest = seconds - bench_seconds - 2 * speeds.loading_seconds  # the bench's own is in its seconds
    if rest <= 0:
        return None
    length = min(speeds.conversation_tokens, max_length)
    shares = [_answers_and_passes(rest, speeds, questions, length, passes) for passes in range(1, MOST_PASSES + 1)]
    answers, passes = max(shares, key=lambda share: effective_tokens(share[0] * length, share[1]))
    tokens = int(answers * length * passes)
    batch_tokens = batch_size(tokens, max_length)
    if tokens < STEPS[0] * batch_tokens:
        return None
    return Plan(
        answers=answers,
        passes=passes,
        trained_tokens=tokens,
        answer_seconds=speeds.loading_seconds + answers * speeds.answer_tokens / speeds.answer_rate,
        feature_seconds=speeds.loading_seconds + answers * length / speeds.feature_rate,
        training_seconds=tokens / speeds.evaluated_train_rate,
        bench_seconds=bench_seconds,
        bench_questions=bench_count,
        bench_tokens=bench_tokens,
        batch_tokens=batch_tokens,
    )


def _answers_and_passes(seconds: float, speeds: Speeds, questions: int, length: float, passes: int) -> tuple[int, int]:
    each = speeds.answer_tokens / speeds.answer_rate + length / speeds.feature_rate
    each += passes * length / speeds.evaluated_train_rate
    return min(questions, int(seconds / each)), passes


def _bench(seconds: float, speeds: Speeds) -> tuple[int, int, float]:
    """Return (questions, tokens of an answer, seconds): every question is answered plainly and drafted, and the first
    one once more to warm up."""
    room = min(MOST_BENCH_SECONDS, BENCH_SHARE * seconds) - BENCH_EXTRA_SECONDS
    tokens = int(min(BENCH_TOKENS[1], max(BENCH_TOKENS[0], room * speeds.plain_rate / 2 / 8)))
    each = 2 * min(tokens, speeds.answer_tokens) / speeds.plain_rate
    count = int(min(BENCH_QUESTIONS[1], max(BENCH_QUESTIONS[0], room / each)))
    return count, tokens, BENCH_EXTRA_SECONDS + speeds.loading_seconds + (count + 1) * each


def effective_tokens(tokens: float, passes: float) -> float:
    """Return the number of new tokens worth `tokens` tokens read `passes` times."""
    if passes <= 1:
        return tokens * passes
    return tokens * (1 + REPEATS_WORTH * (1 - math.exp(-(passes - 1) / REPEATS_WORTH)))


def batch_size(tokens: float, max_length: int) -> int:
    """Return the tokens of a batch: small ones where there are few, so that there are enough updates
    of the weights, but at least one example."""
    min_tokens, max_tokens = BATCH_TOKENS
    size = max(min_tokens, max_length)
    while 2 * size <= max_tokens and 2 * size * STEPS[1] <= tokens:
        size *= 2
    return size


def training_tokens(seconds: float, speeds: Speeds, tokens: int) -> int:
    """Return how many tokens a training reads in so many seconds, over a text of `tokens` tokens."""
    return int(min(MOST_PASSES * tokens, max(seconds * speeds.evaluated_train_rate, tokens)))


def evaluation_prompts(training_seconds: float, speeds: Speeds) -> int:
    """Return how many held-out prompts an evaluation answers in its share of the training."""
    seconds = EVALUATION_SHARE * training_seconds / EVALUATIONS
    min_prompts, max_prompts = EVALUATION_PROMPTS
    return int(min(max_prompts, max(min_prompts, seconds / (EVALUATION_TOKENS * speeds.chain_pass_seconds))))


def heldout_share(conversations: int) -> float:
    """Return the share of the answers that is kept for evaluations."""
    return min(0.2, max(0.02, HELDOUT_CONVERSATIONS / max(1, conversations)))
