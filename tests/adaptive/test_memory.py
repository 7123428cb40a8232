"""What one process learnt of a head's drafts, the next begins with; and a warning where a head accepts too little."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from curves import LIMIT, curve
from eyas.adaptive import AdaptiveController
from eyas.adaptive.goodput import PRIOR_CHANCE
from eyas.adaptive.memory import CHECKED_CYCLES, Memory, Remembered, first_chance
from eyas.core.target import Target
from heads import make
from simulated import FALLBACK, SimulatedMachine

MIDDLE, CHEAP = curve(0.1, 0.05), curve(0.03, 0.05)


def memory(folder: Path) -> Memory:
    return Memory(folder / "paid.json", {"head": "a"})


def controller(costs: Any, folder: Path | None, **others: Any) -> AdaptiveController:
    kept = None if folder is None else memory(folder)
    return AdaptiveController(lambda: costs, LIMIT, fallback=FALLBACK, memory=kept, **others)


def first_cycles(costs: Any, folder: Path | None, skill: float, rows: int) -> SimulatedMachine:
    machine = SimulatedMachine(costs, skill=lambda t: skill, rows=rows, moods=0.5, seed=50)
    return machine.run(controller(costs, folder), 100)


@pytest.mark.parametrize(
    ("costs", "skill", "rows", "gain"), [(MIDDLE, 0.2, 1, 1.005), (MIDDLE, 0.2, 4, 1.01), (CHEAP, 1.0, 4, 1.03)]
)
def test_the_next_process_begins_where_the_last_one_ended(
    costs: Any, skill: float, rows: int, gain: float, tmp_path: Path
) -> None:
    """A head that does not pay is not tried at length again; one that pays has its trees at once."""
    SimulatedMachine(costs, skill=lambda t: skill, rows=rows, moods=0.5).run(controller(costs, tmp_path), 800)
    new, knowing = (first_cycles(costs, folder, skill, rows).speedup() for folder in (None, tmp_path))
    assert knowing > gain * new


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"key": {"head": "a"}}', '{"key": {"head": "b"}, "remembered": {"trees": [], "tokens": [[1, 3.0]]}}',
    '{"key": {"head": "a"}, "remembered": {"trees": [[NaN]], "tokens": []}}',
    '{"key": {"head": "a"}, "remembered": {"trees": [[-1.0]], "tokens": []}}',
    '{"key": {"head": "a"}, "remembered": {"trees": [], "tokens": [[1, 0.5]]}}',
    '{"key": {"head": "a"}, "remembered": {"trees": 1, "tokens": []}}',
])  # fmt: skip
def test_a_file_that_cannot_be_used_counts_for_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "paid.json").write_text(content)
    assert memory(tmp_path).read() is None


def test_other_weights_have_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = Target(zoo.tiny("llama"), "tiny-llama")
    first, second = (make("eagle1", target) for _ in range(2))
    assert Memory.of(first).path == Memory.of(second).path
    with torch.no_grad():
        next(iter(second.net.parameters())).add_(1)
    assert Memory.of(first).path != Memory.of(second).path
    Memory.of(first).keep(Remembered((), ((1, 2.5),)))
    assert Memory.of(first).read() == Remembered((), ((1, 2.5),))
    assert Memory.of(second).read() is None
    assert json.loads(Memory.of(first).path.read_text())["key"]["method"] == "eagle1"


@pytest.mark.parametrize(
    ("trained", "skill", "warned"), [(0.6, 0.3, True), (0.6, 1.0, False), (None, 0.3, False), (0.2, 0.3, False)]
)
def test_a_head_that_accepts_less_than_half_of_its_training_is_named_once(
    trained: float | None, skill: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With a pass over more tokens for nothing, the head goes on drafting whatever it accepts."""
    costs = curve(0.0, 0.0)
    machine = SimulatedMachine(costs, skill=lambda t: skill * 0.5)
    machine.run(controller(costs, None, trained=trained), 4 * CHECKED_CYCLES)
    found = [record.getMessage() for record in caplog.records if "in its training" in record.getMessage()]
    assert len(found) == warned


def of(source: Any) -> Any:
    return SimpleNamespace(source=source)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"heldout"', '{"heldout": null}', '{"heldout": {}}', '{"heldout": {"0-alpha": "x"}}']
)
def test_no_record_that_can_be_read(content: str, tmp_path: Path) -> None:
    """Heads of others have no record, or another one: no error."""
    (tmp_path / "training.json").write_text(content)
    without = (of(tmp_path), of("somebody/a-head"), of(None), SimpleNamespace())
    assert {first_chance(drafter) for drafter in without} == {PRIOR_CHANCE}


def test_batches_begin_plainly_where_the_record_promises_too_little() -> None:
    """With 16 rows this head does not pay: its record (0.35) says so; the assumed share (0.7) loses over 2 %."""
    costs, speedups = curve(0.03, 0.05), {}
    for chance in (0.35, 0.7):
        machine = SimulatedMachine(costs, skill=lambda t: 0.5, rows=16)
        policy = AdaptiveController(lambda: costs, LIMIT, fallback=FALLBACK, chance=chance)
        speedups[chance] = machine.run(policy, 100).speedup()
        assert (machine.share("draft") == 0) == (chance == 0.35)
    assert speedups[0.35] > 0.99
    assert speedups[0.7] < 0.98
