"""The controller reads the record of a head's training, and begins with the acceptance that it states."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zoo
from curves import LIMIT, curve
from eyas import checkpoints, tiny
from eyas.adaptive import AdaptiveController
from eyas.adaptive.goodput import PRIOR_CHANCE
from eyas.adaptive.memory import first_chance
from eyas.core.target import Target
from eyas.drafters import find
from heads import make
from simulated import FALLBACK, SimulatedMachine

OPTIONS = {"eagle3": {"head.layers": "0,2,3"}}


def of(source: Any) -> Any:
    return SimpleNamespace(source=source)


def test_the_share_that_was_measured(tmp_path: Path) -> None:
    """Shares of few texts may be 0 or 1, which no tree can be planned with."""
    for share, expected in ((0.4655, 0.4655), (0, 0.02), (1.0, 0.98)):
        (tmp_path / "training.json").write_text(json.dumps({"heldout": {"0-alpha": share}}))
        assert first_chance(of(tmp_path)) == first_chance(of(str(tmp_path))) == expected


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"heldout"', '{"heldout": null}', '{"heldout": {}}', '{"heldout": {"0-alpha": "x"}}']
)
def test_no_record_that_can_be_read(content: str, tmp_path: Path) -> None:
    """Heads of others have no record, or another one: no error."""
    (tmp_path / "training.json").write_text(content)
    without = (of(tmp_path), of("somebody/a-head"), of(None), SimpleNamespace())
    assert {first_chance(drafter) for drafter in without} == {PRIOR_CHANCE}


def test_loaded_heads_know_their_folder(tmp_path: Path) -> None:
    """Guards against a method that loads its head another way and forgets where it is from."""
    target = Target(zoo.tiny("llama"), "tiny-llama")
    for name in ("eagle1", "eagle3", "mtp"):
        checkpoints.save(make(name, target, **OPTIONS.get(name, {})).weights(), tmp_path / name)
        (tmp_path / name / "training.json").write_text('{"heldout": {"0-alpha": 0.25}}')
        assert first_chance(find(name).from_pretrained(tmp_path / name, target)) == 0.25
    assert first_chance(make("eagle1", target)) == PRIOR_CHANCE


def test_heads_that_come_with_eyas_have_records() -> None:
    for head in tiny.HEADS.values():
        assert 0.2 < first_chance(of(head)) < 0.9
        assert first_chance(of(head)) != PRIOR_CHANCE


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


def test_one_row_drafts_at_once_with_any_record() -> None:
    """A weak head pays too where a pass over a few more tokens takes hardly longer."""
    costs = curve(0.02, 0.05)
    for chance in (0.35, 0.7):
        machine = SimulatedMachine(costs)
        machine.run(AdaptiveController(lambda: costs, LIMIT, fallback=FALLBACK, chance=chance), 20)
        assert machine.share("draft") > 0.5
