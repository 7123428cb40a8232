"""How long `eyas accelerate` looks before it says what it will do: a verdict from sizes first, then trials that fit a slow machine."""

from __future__ import annotations

import time
from typing import Any

import pytest

import eyas
from eyas.adaptive import cost
from eyas.core.target import Target
from eyas.errors import InputError
from eyas_train.accelerate import prospect, trial
from eyas_train.accelerate.material import read_material


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


class Machine:
    """A clock that goes on by tokens alone: a pass takes as long as its tokens, but at least as long as a few."""

    FEWEST = 4

    def __init__(self, tokens_per_second: float) -> None:
        self.rate, self.now, self.passes = tokens_per_second, 1000.0, 0

    def read(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.passes += 1
        self.now += max(self.FEWEST, args[0].numel()) / self.rate

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rate", [1.0, 100.0, 1000.0])
def test_the_whole_look_takes_a_minute(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a busy machine, measuring the costs of trees took minutes, because it had no limit. The machine of this test
    reads `rate` tokens a second. The test counts tokens and reads no clock. The verdict from sizes
    comes before the first pass, and a fast machine measures everything."""
    llm, machine = eyas.load(method="vanilla", kernels="off"), Machine(rate)
    parameters = sum(p.numel() for p in llm.target.family.layers.parameters())
    monkeypatch.setattr(trial, "multiplications_per_second", lambda _: rate * parameters)
    monkeypatch.setattr(prospect, "load_costs", lambda drafter: (cost.measure(drafter), False))  # nothing is known
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, machine.clock)
    said = dict[str, int]()
    monkeypatch.setattr(prospect.log, "info", lambda text, *_: said.setdefault(text[:20], machine.passes))
    hook = llm.target.family.embedding.register_forward_hook(machine.read)
    models = type("Models", (), {"loading_seconds": 1.0, "for_training": lambda _: llm, "for_answers": lambda _: llm})()
    week = 7 * 86_400.0
    try:
        found = prospect.look(models, read_material(()), ("mtp", "eagle3"), week)
    finally:
        hook.remove()
        monkeypatch.undo()
    assert machine.now - 1000 <= 1.1 * prospect.MOST_SECONDS
    assert said["by its size alone th"] == 0
    assert (len(found.costs.branches) > 1) == (rate >= 1000)
    assert 0.2 * rate <= found.speeds.feature_rate <= 1.1 * rate
