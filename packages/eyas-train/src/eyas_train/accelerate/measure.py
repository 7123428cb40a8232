"""Short trials of a model on this machine: how fast each step of a run is, and the plan that follows.

The first trial reads a few tokens. Its speed gives the sizes of the others, so that each takes a quarter of a minute at
most. Where the machine is too slow for one of them, the first one's speed takes its place. Results are thrown away.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from eyas import drafters
from eyas.api import LLM
from eyas.core.target import Target
from eyas.core.totals import tokens_per_second
from eyas.drafters import DraftMethod
from eyas.errors import EyasError, InputError
from eyas.passes import CONTEXT, seconds_of, time_passes
from eyas.text import encode_part, render
from eyas_train.accelerate.material import Material
from eyas_train.accelerate.plan import Prospect, Speeds, make_plan
from eyas_train.config import TrainConfig
from eyas_train.data import Example, Examples
from eyas_train.loop import train
from eyas_train.regenerate import Conversation, DataLine, GenerationSettings, parse_conversation, regenerate
from eyas_train.reporter import read_log

log = logging.getLogger("eyas.accelerate")  # the command line shows its messages

METHODS = ("mtp", "eagle3")  # the faster learner comes first (docs/guide/train.md)
TRIAL_SECONDS = 15.0  # of each trial at most; at most 3 % of the time
LEAST_TOKENS, MOST_TOKENS = 32, 512  # tokens that a trial reads at a time
TRIAL_BATCHES = 10  # batches that the trial of a method reads or trains on, about
LONG_SECONDS = 5.0  # what takes longer is not timed again
MOST_LENGTH = 1024  # tokens of a training example


class Models(Protocol):
    """The target in its two forms. Asking for one may unload the other."""

    loading_seconds: float  # time that the last load took

    def for_answers(self) -> LLM:
        """Return the target by the fastest runner, with plain decoding."""
        ...

    def for_training(self) -> LLM:
        """Return the target by its own forward."""
        ...


def look(models: Models, material: Material, methods: Sequence[str], seconds: float) -> Prospect:
    """Measure the model and the machine, and return the plan of the first method that suits the model.

    Args:
        seconds: the time for everything, this included.

    Raises:
        EyasError: none of the methods suits this model; or too little time, or no usable question.
    """
    began, trial_seconds = time.monotonic(), min(TRIAL_SECONDS, 0.03 * seconds)
    log.info("trying how fast each step is on this machine (%s)", " and ".join(methods))
    training = models.for_training()
    loading, target = models.loading_seconds, training.target
    least = min(LEAST_TOKENS, target.context)
    reading = feature_rate(target, (), least, least)
    method, feature_tokens, train_tokens = _rates_of(methods, target, reading, trial_seconds)
    del training, target
    llm = models.for_answers()
    settings = GenerationSettings(max_new_tokens=min(256, llm.target.context // 2))
    rows = min(8 if llm.target.device.type == "cpu" else 16, len(material.answers))
    answer_rate, answer, prompt = answer_speed(llm, material.answers, settings, rows, trial_seconds, reading)
    context, plain = min(CONTEXT, int(reading * trial_seconds / 2)), answer_rate / rows
    if context >= LEAST_TOKENS:
        plain = 1 / time_passes(llm.target, context, (1,), ()).medians[1]
    speeds = Speeds(loading, rows, answer_rate, answer, prompt, feature_tokens, train_tokens, plain)
    max_length = min(MOST_LENGTH, llm.target.context, _above(4 * (prompt + answer)))
    plan = make_plan(seconds - (time.monotonic() - began), speeds, len(material.answers), max_length)
    return Prospect(method, llm.target.name, max_length, settings.max_new_tokens, speeds, plan)


def _rates_of(methods: Sequence[str], target: Target, reading: float, seconds: float) -> tuple[str, float, float]:
    """Return the first method that suits this target, and the tokens per second of its features and its training. Raise
    the error of the first method if none does."""
    refusals = list[EyasError]()
    for name in methods:
        try:
            kind, counts_V = drafters.find(name), torch.ones(target.vocab_size, dtype=torch.long)
            drafter = kind.init_for_training(target, kind.Options(), 0, counts_V)
            affordable = reading * seconds / TRIAL_BATCHES
            if affordable < LEAST_TOKENS:
                return name, reading, reading
            batch = min(MOST_TOKENS, _above(affordable + 1) // 2)
            length = min(MOST_TOKENS // 2, batch, target.context)
            found = feature_rate(target, drafter.train_feature_layers, length, batch)
            return name, found, training_rate(drafter, length, batch)
        except EyasError as error:
            refusals.append(error)
            log.info("%s is left out: %s", name, error)
    raise refusals[0]


def _above(number: float) -> int:
    """Return the power of two that is not below the number."""
    return 1 << max(0, int(number - 1).bit_length())


def feature_rate(target: Target, layers: Sequence[int], length: int, batch_tokens: int) -> float:
    """Return how many tokens of examples of this length the target reads in a second."""
    tokens_RT = torch.randint(target.vocab_size, (max(1, batch_tokens // length), length), device=target.device)

    def once() -> float:
        return seconds_of(lambda: target.encode(tokens_RT, layers), target.device)

    seconds = once()  # warms up
    if seconds < LONG_SECONDS:
        seconds = min(seconds, once())
    return tokens_per_second(tokens_RT.numel(), seconds)


def training_rate(drafter: DraftMethod, length: int, batch_tokens: int) -> float:
    """Return how many tokens of examples of this length, of which four in five count, are trained on in a second, with
    features that are there. The drafter's net is changed."""
    target, rng, steps = drafter.target, random.Random(0), 3  # the first step warms up
    examples = Examples()
    for _ in range(max(1, steps * (batch_tokens // length))):
        ids = [rng.randrange(target.vocab_size) for _ in range(length)]
        examples.append(Example(ids, [i >= 0.2 * length for i in range(length)]))
    config = TrainConfig(
        steps=steps, batch_tokens=batch_tokens, max_length=length, eval_every=0, save_every=0, log_every=1
    )
    with tempfile.TemporaryDirectory() as folder:
        if train(drafter, examples, (), config, folder).interrupted:
            raise KeyboardInterrupt
        first, *_, last = read_log(Path(folder))
    tokens = last["tokens"] - first["tokens"]
    reading = tokens / feature_rate(target, drafter.train_feature_layers, length, batch_tokens)
    seconds = last["seconds"] - first["seconds"]
    return tokens_per_second(tokens, max(seconds / 10, seconds - reading))


class _TimeIsUp(Exception):  # noqa: N818 - not an error
    pass


def answer_speed(
    llm: LLM, lines: Sequence[DataLine], settings: GenerationSettings, rows: int, seconds: float, reading: float
) -> tuple[float, float, float]:
    """Let the target answer some of these questions for so many seconds.

    Conversations that have not ended by then count too. The mean length is all tokens over the number of ends,
    as if each token were the last with the same chance.

    Args:
        rows: how many are answered at a time; fewer where their prompts alone would take half of the seconds.
        reading: tokens of prompts that are read in a second, about. Where that is too slow for one prompt, nothing is
            answered, and the speed is estimated from it.

    Returns:
        Tokens per second of all rows, and the mean tokens of a conversation's answers and of its rest.
    """
    assert llm.tokenizer is not None
    conversations = _usable(lines, settings, 4 * rows)
    most = settings.max_new_tokens * sum(len(each.turns) for each in conversations) / len(conversations)
    prompt = sum(_prompt_tokens(llm, each) for each in conversations) / len(conversations)
    affordable = int(seconds * reading / 2 / prompt)
    if affordable < 1:
        return reading, most / 2, prompt
    tokens = ended = 0
    began = time.monotonic()

    def on_step(new: int) -> None:
        nonlocal tokens
        tokens += new
        if time.monotonic() - began > seconds:
            raise _TimeIsUp

    rows = min(rows, affordable)
    with suppress(_TimeIsUp):
        for _ in regenerate(llm.drafter, llm.tokenizer, llm.eos, conversations, settings, rows, on_step):
            ended += 1
    if not tokens and not ended:
        return reading, most / 2, prompt
    rate = tokens_per_second(tokens, time.monotonic() - began)
    if not rate:
        raise InputError(f"{lines[0].where}: the target has no room for an answer to any of the first questions")
    return rate, min(most, tokens / ended) if ended else most, prompt


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
        with suppress(InputError):
            found.append(parse_conversation(line, settings))
        if len(found) == count:
            break
    if not found:
        raise InputError(f"{lines[0].where}: no line holds a question that can be answered")
    return found
