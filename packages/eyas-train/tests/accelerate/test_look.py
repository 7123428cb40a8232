"""How long `eyas accelerate` looks before it says what it will do: trials that fit a slow machine."""

from __future__ import annotations

import time
from typing import Any

import pytest

import eyas
from eyas_train.accelerate import measure
from eyas_train.accelerate.material import read_material


class Machine:
    """A clock that goes on by tokens alone: a pass takes as long as its tokens, but at least as long as a few."""

    def __init__(self, tokens_per_second: float) -> None:
        self.rate, self.now = tokens_per_second, 1000.0

    def read(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.now += max(4, args[0].numel()) / self.rate

    def clock(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rate", [1.0, 100.0, 1000.0])
def test_the_whole_look_takes_a_minute(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a busy machine, measuring took minutes, because it had no limit. The machine of this test reads `rate` tokens
    a second. The test counts tokens and reads no clock."""
    llm, machine = eyas.load(method="vanilla", kernels="off"), Machine(rate)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, machine.clock)
    hook = llm.target.family.embedding.register_forward_hook(machine.read)
    models = type("Models", (), {"loading_seconds": 1.0, "for_training": lambda _: llm, "for_answers": lambda _: llm})()
    week = 7 * 86_400.0
    try:
        found = measure.look(models, read_material(()), ("mtp", "eagle3"), week)
    finally:
        hook.remove()
        monkeypatch.undo()
    assert machine.now - 1000 <= 66
    assert 0.2 * rate <= found.speeds.feature_rate <= 1.1 * rate
    assert 0.01 * rate <= found.speeds.plain_rate <= rate
