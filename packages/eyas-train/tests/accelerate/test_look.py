"""How long `eyas accelerate` looks before it says what it will do: a verdict from sizes first, then trials that fit a slow machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import eyas
from eyas import drafters
from eyas.core.target import Target
from eyas.errors import InputError
from eyas_train.accelerate import prospect, trial


@pytest.fixture(scope="module")
def target() -> Target:
    return eyas.load(method="vanilla", kernels="off").target


def test_too_little_time_is_said_by_sizes_alone(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a look of ten minutes, and then: 30 minutes are too few. A machine that multiplies a thousand numbers in a
    second trains nothing in an hour; with a fast one nothing is refused."""
    monkeypatch.setattr(target, "encode", lambda *_: pytest.fail("nothing is tried for this verdict"))
    monkeypatch.setattr(trial, "multiplications_per_second", lambda _: 1e3)
    said = r"60\.0 minutes are left, too few to train a head of this model on this machine"
    with pytest.raises(InputError, match=said):
        prospect._judge_by_size(target, 1.0, 800, 3600)
    monkeypatch.setattr(trial, "multiplications_per_second", lambda _: 1e11)
    prospect._judge_by_size(target, 1.0, 800, 3600)


@pytest.mark.parametrize(("rate", "batch"), [(1e9, 512), (50.0, 64), (0.01, 32)])
def test_trials_are_smaller_on_a_slow_machine(
    rate: float, batch: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the trial of a training reads the same 5,000 tokens on every machine, for minutes on a slow one. About ten
    batches in 20 seconds, of 32 to 512 tokens."""
    tried = list[tuple[int, int]]()

    def noted(length: int, tokens: int) -> float:
        tried.append((length, tokens))
        return rate

    monkeypatch.setattr(trial, "feature_rate", lambda target, layers, length, tokens: noted(length, tokens))
    monkeypatch.setattr(trial, "training_rate", lambda drafter, length, counted, tokens: noted(length, tokens))
    prospect._rates(drafters.find("mtp"), target, 20.0)
    assert tried == [(32, 32), *[(min(256, batch), batch)] * 2]


def test_the_look_has_a_limit(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with a day of time the trials take an hour, as their limit is a share."""
    given = list[float]()

    def rates(kind: Any, target: Target, seconds: float) -> prospect._Rates:
        given.append(seconds)
        return prospect._Rates(1.0, 1.0)

    class Looked(Exception):  # noqa: N818 - not an error
        pass

    def end(*_: object) -> Callable[[], None]:
        raise Looked

    monkeypatch.setattr(prospect, "_rates", rates)
    monkeypatch.setattr(prospect, "_judge_by_size", lambda *_: None)
    monkeypatch.setattr(trial, "chain_pass_seconds", end)
    llm = eyas.load(method="vanilla", kernels="off")
    models = type("Models", (), {"loading_seconds": 1.0, "for_training": lambda _: llm})()
    material: Any = type("Material", (), {"answers": [None] * 9})()
    with pytest.raises(Looked):
        prospect.look(models, material, ("mtp", "eagle3"), 86_400)
    assert sum(given) <= prospect.MOST_LOOK_SECONDS <= 30
