"""Short trials on this machine: how fast each step of a run is. Their results are thrown away.

This module prints nothing and knows no plan.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from eyas.api import LLM
from eyas.core.target import Target
from eyas.core.totals import tokens_per_second
from eyas.drafters import DraftMethod
from eyas.errors import InputError
from eyas.passes import seconds_of, verify_cost
from eyas.text import encode_part, render
from eyas_train.config import TrainConfig
from eyas_train.data import Example, Examples
from eyas_train.log import read_log
from eyas_train.loop import train
from eyas_train.regenerate import Conversation, DataLine, GenerationSettings, parse_conversation, regenerate

__all__ = [
    "CHAIN_NODES",
    "AnswerSpeed",
    "Watch",
    "answer_speed",
    "chain_pass_seconds",
    "feature_rate",
    "multiplications_per_second",
    "training_rate",
]

MATRIX, MATRIX_TOKENS = 1024, 128  # sizes of a product that shows the speed of the machine
TRAINING_STEPS = 3  # the first one warms up
LONG_SECONDS = 5.0  # what takes longer is not timed again
CHAIN_NODES = 6  # nodes of the chains that an evaluation drafts, the root included


class AnswerSpeed(NamedTuple):
    """How the target answers."""

    rate: float  # tokens per second of all rows
    answer_tokens: float  # mean tokens of a conversation's answers
    prompt_tokens: float  # mean tokens of the rest of a conversation
    longest: int  # tokens that the longest conversation can have


class Watch:
    """The time that all trials may take together."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.ends - time.monotonic())

    def suffices(self, seconds: float) -> bool:
        """Return whether a trial that takes so many seconds, about, may begin."""
        return seconds <= self.left

    def wait(self, seconds: float) -> None:
        """Leave out seconds that no trial took, such as the seconds of a load."""
        self.ends += seconds


class _TimeIsUp(Exception):  # noqa: N818 - not an error
    pass


def answer_speed(
    llm: LLM, lines: Sequence[DataLine], settings: GenerationSettings, rows: int, seconds: float, reading: float
) -> AnswerSpeed:
    """Let the target answer some of these questions for so many seconds.

    Conversations that have not ended by then count too. The mean length is all tokens over the number of ends,
    as if each token were the last with the same chance.

    Args:
        rows: how many are answered at a time; fewer where their prompts alone would take half of the seconds.
        reading: tokens of prompts that are read in a second, about. Where that is too slow for one prompt, nothing is
            answered, and the speed is estimated from it.
    """
    assert llm.tokenizer is not None
    conversations = _usable(lines, settings, 4 * rows)
    prompts = [_prompt_tokens(llm, each) for each in conversations]
    rooms = [settings.max_new_tokens * len(each.turns) for each in conversations]
    most, mean = sum(rooms) / len(rooms), sum(prompts) / len(prompts)
    longest = max(prompt + room for prompt, room in zip(prompts, rooms, strict=True))
    estimate = AnswerSpeed(reading, most / 2, mean, longest)
    affordable = int(seconds * reading / 2 / mean)
    if affordable < 1:
        return estimate
    tokens = ended = 0
    began = time.monotonic()

    def on_step(new: int) -> None:
        nonlocal tokens
        tokens += new
        if time.monotonic() - began > seconds:
            raise _TimeIsUp

    try:
        for _ in regenerate(
            llm.drafter, llm.tokenizer, llm.eos, conversations, settings, min(rows, affordable), on_step
        ):
            ended += 1
    except _TimeIsUp:
        if not tokens:
            return estimate
    rate = tokens_per_second(tokens, time.monotonic() - began)
    if not rate:
        raise InputError(f"{lines[0].where}: the target has no room for an answer to any of the first questions")
    length = min(most, tokens / ended) if ended else most
    return AnswerSpeed(rate, length, mean, longest)


def _prompt_tokens(llm: LLM, conversation: Conversation) -> int:
    """Return the tokens of a conversation without the answers."""
    assert llm.tokenizer is not None
    first = conversation.turns[0]
    later = [m for i, m in enumerate(conversation.messages) if i > first and i not in conversation.turns]
    texts = [content for message in later if isinstance(content := message["content"], str)]
    prompt = render(llm.tokenizer, conversation.messages[:first], **conversation.template)
    return len(prompt) + sum(len(encode_part(llm.tokenizer, text, "a message")) for text in texts)


def _usable(lines: Sequence[DataLine], settings: GenerationSettings, count: int) -> list[Conversation]:
    """Return the first conversations that can be parsed."""
    found = list[Conversation]()
    for line in lines:
        if len(found) == count:
            break
        try:
            found.append(parse_conversation(line, settings))
        except InputError:
            continue
    if not found:
        raise InputError(f"{lines[0].where}: no line holds a question that can be answered")
    return found


def multiplications_per_second(target: Target) -> float:
    """Return how many numbers of a large matrix this machine multiplies in a second, for many tokens at a time."""
    weight_OI = torch.ones(MATRIX, MATRIX, dtype=target.dtype, device=target.device)
    tokens_TI = weight_OI[:MATRIX_TOKENS]
    seconds = min(seconds_of(lambda: tokens_TI @ weight_OI.T, target.device) for _ in range(10))
    return MATRIX_TOKENS * MATRIX * MATRIX / seconds


def feature_rate(target: Target, layers: Sequence[int], length: int, batch_tokens: int) -> float:
    """Return how many tokens of examples of this length the target reads in a second."""
    shape = (max(1, batch_tokens // length), length)
    tokens_RT = torch.randint(target.vocab_size, shape, device=target.device)

    def once() -> float:
        return seconds_of(lambda: target.encode(tokens_RT, layers), target.device)

    seconds = once()  # warms up
    if seconds < LONG_SECONDS:
        seconds = min(seconds, once())
    return tokens_per_second(tokens_RT.numel(), seconds)


def training_rate(drafter: DraftMethod, length: int, counted: int, batch_tokens: int) -> float:
    """Return how many tokens of examples of this length are trained on in a second, with features
    that are there. The drafter's net is changed.

    Args:
        counted: tokens of an example that count.
    """
    target, rng = drafter.target, random.Random(0)
    examples = Examples()
    for _ in range(max(1, TRAINING_STEPS * (batch_tokens // length))):
        ids = [rng.randrange(target.vocab_size) for _ in range(length)]
        examples.append(Example(ids, [i >= length - counted for i in range(length)]))
    config = TrainConfig(
        steps=TRAINING_STEPS, batch_tokens=batch_tokens, max_length=length, eval_every=0, save_every=0, log_every=1
    )
    with tempfile.TemporaryDirectory() as folder:
        if train(drafter, examples, (), config, folder).interrupted:
            raise KeyboardInterrupt
        first, *_, last = read_log(Path(folder))
    tokens = last["tokens"] - first["tokens"]
    reading = tokens / feature_rate(target, drafter.train_feature_layers, length, batch_tokens)
    seconds = last["seconds"] - first["seconds"]
    return tokens_per_second(tokens, max(seconds / 10, seconds - reading))


def chain_pass_seconds(target: Target, context: int) -> float:
    """Return the seconds of a pass over the chain that an evaluation drafts, after so many tokens."""
    (cost,) = verify_cost(target, context, (CHAIN_NODES,))
    return cost["ms"] / 1e3
