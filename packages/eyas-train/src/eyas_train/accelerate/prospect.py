"""Measure a model on this machine, and plan the run: the speeds and costs, and the plan that follows from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import torch

from eyas import drafters
from eyas.adaptive.cost import Costs, load_costs
from eyas.api import LLM
from eyas.core.target import Target
from eyas.drafters import DraftMethod
from eyas.errors import EyasError
from eyas.passes import CONTEXT, time_passes
from eyas_train.accelerate import trial
from eyas_train.accelerate.material import Material
from eyas_train.accelerate.plan import Plan, Speeds, make_plan
from eyas_train.regenerate import GenerationSettings

__all__ = ["METHODS", "Models", "Prospect", "look"]

log = logging.getLogger("eyas.accelerate")  # the command line shows its messages

METHODS = ("mtp", "eagle3")  # the one that learns faster (docs/guide/train.md) first
ROWS = {"cpu": 8}  # conversations that are answered at a time; elsewhere OTHER_ROWS
OTHER_ROWS = 16
MOST_NEW_TOKENS = 256  # an answer is cut there
MOST_SECONDS = 60.0  # of all trials together
LOOK_SHARE, MOST_LOOK_SECONDS = 0.05, 20.0  # for trying methods: share of the time, and its limit
LENGTHS, MOST_LENGTH = 4, 1024  # a training example is cut at so many mean lengths, and at so many tokens
TRIAL_SHARE, MOST_TRIAL_SECONDS = 0.03, 15.0  # share of the time for the trial of answering, and its limit
TRIAL_LENGTH, TRIAL_BATCH = 256, 512  # tokens of an example and of a batch in the trial of a training, at most
LEAST_BATCH = 32  # tokens of such a batch where the target is slow; where it is slower yet, nothing is tried
SHORT_CONTEXT = 32  # tokens before the passes that are timed where the target is slow
COST_TOKENS, COST_PASSES = 4_000, 200  # tokens of prompts and small passes that a measurement of costs takes, about
TRIAL_PASSES = 10  # batches that the trial of a method reads or trains on, about
AT_BEST = 2.0  # factor of a speed that is estimated from sizes, so that no training is refused that would fit
COUNTED_SHARE = 0.8  # share of these tokens that are an answer's


class Models(Protocol):
    """The target in its two forms. Asking for one may unload the other."""

    loading_seconds: float  # time that the last load took

    def for_answers(self) -> LLM:
        """Return the target by the fastest runner, with plain decoding."""
        ...

    def for_training(self) -> LLM:
        """Return the target by its own forward."""
        ...


@dataclass(frozen=True)
class Prospect:
    """A method, with the plan of its run."""

    method: str
    target: str
    max_length: int  # tokens of a training example
    max_new_tokens: int  # most tokens of an answer
    speeds: Speeds
    plan: Plan
    costs: Costs

    def to_json(self) -> dict[str, Any]:
        """Return it as `json` writes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the prospect that `to_json` described."""
        parsed = {
            "speeds": Speeds(**fields["speeds"]),
            "plan": Plan(**fields["plan"]),
            "costs": Costs.from_json(fields["costs"]),
        }
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__} | parsed)


@dataclass(frozen=True)
class _Rates:
    """Tokens per second of a method's steps."""

    feature: float
    train: float


def look(models: Models, material: Material, methods: Sequence[str], seconds: float) -> Prospect:
    """Measure the model and the machine, and return the plan of the first method that suits the model.

    Args:
        seconds: the time for everything, this included.

    Raises:
        EyasError: none of the methods suits this model; or too little time, or no usable question.
    """
    began = time.monotonic()
    log.info("trying how fast each step is on this machine (%s)", " and ".join(methods))
    training = models.for_training()
    loading, target = models.loading_seconds, training.target
    watch = trial.Watch(MOST_SECONDS)
    _judge_by_size(target, loading, len(material.answers), seconds)
    reading = trial.feature_rate(target, (), *[min(LEAST_BATCH, target.context)] * 2)
    name, rates = _rates_of(methods, target, reading, min(MOST_LOOK_SECONDS, LOOK_SHARE * seconds))
    chain_pass = _chain_pass(target, reading, watch)
    del training, target
    loaded = time.monotonic()
    llm = models.for_answers()
    watch.wait(time.monotonic() - loaded)
    new_tokens = min(MOST_NEW_TOKENS, llm.target.context // 2)
    rows = min(ROWS.get(llm.target.device.type, OTHER_ROWS), len(material.answers))
    trial_seconds = min(MOST_TRIAL_SECONDS, TRIAL_SHARE * seconds, watch.left)
    answers = trial.answer_speed(
        llm, material.answers, GenerationSettings(max_new_tokens=new_tokens), rows, trial_seconds, reading
    )
    longest = min(answers.longest, LENGTHS * (answers.prompt_tokens + answers.answer_tokens))
    max_length = min(MOST_LENGTH, llm.target.context, _above(longest))
    costs = _costs(drafters.find(name).random(llm.target), reading, chain_pass, watch)
    speeds = _speeds(loading, rows, answers, rates, chain_pass, costs)
    plan = make_plan(seconds - (time.monotonic() - began), speeds, len(material.answers), max_length)
    return Prospect(name, llm.target.name, max_length, new_tokens, speeds, plan, costs)


def _chain_pass(target: Target, reading: float, watch: trial.Watch) -> float:
    """Return the seconds of a pass over a short chain: measured, or estimated from the tokens that are read in a second."""
    for context in (CONTEXT, SHORT_CONTEXT):
        if watch.suffices((context + TRIAL_PASSES * trial.CHAIN_NODES) / reading):
            return trial.chain_pass_seconds(target, context)
    return trial.CHAIN_NODES / reading


def _costs(drafter: DraftMethod, reading: float, chain_pass: float, watch: trial.Watch) -> Costs:
    """Return the costs of the method's trees, known or measured. Where the time is too short for that, they have passes
    alone, measured or estimated, and are not kept."""
    if watch.suffices(COST_TOKENS / reading + COST_PASSES * chain_pass):
        return load_costs(drafter)[0]
    log.info("this machine is too slow for a closer look: the costs of trees are not measured")
    nodes: tuple[int, ...] = (1, trial.CHAIN_NODES)
    seconds: tuple[float, ...] = (chain_pass, chain_pass)
    if watch.suffices(SHORT_CONTEXT / reading + TRIAL_PASSES * chain_pass):
        timed = time_passes(drafter.target, SHORT_CONTEXT, nodes, ()).medians
        nodes, seconds = tuple(timed), tuple(timed.values())
    return Costs(SHORT_CONTEXT, nodes, seconds, (1,), (0.0,), (0.0,), 0.0, 0.0)


def _speeds(
    loading: float, rows: int, answers: trial.AnswerSpeed, rate: _Rates, chain_pass: float, costs: Costs
) -> Speeds:
    return Speeds(
        loading_seconds=loading,
        rows=rows,
        answer_rate=answers.rate,
        answer_tokens=answers.answer_tokens,
        prompt_tokens=answers.prompt_tokens,
        feature_rate=rate.feature,
        train_rate=rate.train,
        chain_pass_seconds=chain_pass,
        plain_rate=1 / costs.plain(),
    )


def _rates_of(methods: Sequence[str], target: Target, reading: float, seconds: float) -> tuple[str, _Rates]:
    """Return the first method that suits this target, with its rates. Raise the error of the first method if none does."""
    refusals = list[EyasError]()
    for name in methods:
        try:
            return name, _rates(drafters.find(name), target, reading, seconds / len(methods))
        except EyasError as error:
            refusals.append(error)
            log.info("%s is left out: %s", name, error)
    raise refusals[0]


def _judge_by_size(target: Target, loading: float, questions: int, seconds: float) -> None:
    """Raise InputError if the time is too short for a training even at the speed that sizes alone allow: of a
    multiplication on this machine, and of the target. It takes a moment."""
    parameters = sum(p.numel() for p in target.family.layers.parameters())
    rate = AT_BEST * trial.multiplications_per_second(target) / max(1, parameters)
    tokens = LEAST_BATCH / 2  # short conversations need the fewest tokens
    speeds = Speeds(
        loading_seconds=loading, rows=1, answer_rate=rate, answer_tokens=tokens, prompt_tokens=tokens, feature_rate=rate,
        train_rate=rate, chain_pass_seconds=1 / rate, plain_rate=rate,
    )  # fmt: skip
    plan = make_plan(seconds, speeds, questions, LEAST_BATCH)
    log.info(
        "by its size alone this model reads at most %s tokens/s here, and a head learns from at most %s tokens in the "
        "time; a closer look takes up to a minute",
        f"{rate:,.0f}",
        f"{plan.trained_tokens:,}",
    )


def _rates(kind: type[DraftMethod], target: Target, reading: float, seconds: float) -> _Rates:
    """Return the rates of a method, by a trial that takes about so many seconds at most. A slow machine gets smaller batches,
    and a very slow one estimated rates.

    Args:
        reading: tokens that the target reads in a second.
    """
    every_token_V = torch.ones(target.vocab_size, dtype=torch.long)
    drafter = kind.init_for_training(target, kind.Options(), 0, every_token_V)
    slow = reading * seconds / TRIAL_PASSES
    if slow < LEAST_BATCH:
        return _Rates(reading, reading)
    batch = min(TRIAL_BATCH, _above(slow + 1) // 2)
    length = min(TRIAL_LENGTH, batch, target.context)
    found = trial.feature_rate(target, drafter.train_feature_layers, length, batch)
    return _Rates(found, trial.training_rate(drafter, length, int(COUNTED_SHARE * length), batch))


def _above(number: float) -> int:
    """Return the power of two that is not below the number."""
    return 1 << max(0, int(number - 1).bit_length())
