"""The whole way with a real method: chat text, an unmodified target, EAGLE-1's loss, a published
head that loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import zoo
from eyas import checkpoints
from eyas.core.target import Target
from eyas.drafters.eagle1 import Method
from eyas.targets.fingerprints import fingerprint
from eyas_train import setup
from eyas_train.loop import TrainConfig, train
from heads import language


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return Target(zoo.tiny("llama"), "tiny-llama")


@pytest.mark.cover(precision=1)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_head_is_trained_saved_and_loaded(
    tmp_path: Path, target: Target, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out loss falls, the head in the folder is the best one bit by bit, and it is
    accepted more often than a random one."""
    monkeypatch.setattr(setup, "has_bf16", lambda device: True)  # torch emulates it where the CPU has none
    drafter = Method.random(target, seed=1)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    sizes = {"steps": 40, "batch_tokens": 256, "max_length": 32, "eval_every": 10, "save_every": 20}
    config = TrainConfig(lr=3e-3, precision=precision, **sizes)  # type: ignore[arg-type]
    outcome = train(drafter, language(60, 0), language(12, 1), config, tmp_path)
    history = json.loads((tmp_path / "training.json").read_text())["losses"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert outcome.heldout["accuracy"] > 0.2  # of 160 tokens; a useless head is right about once in a hundred
    again = Method.load(checkpoints.load(tmp_path), target)
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in drafter.net.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    assert all(value.grad is None for value in target.model.parameters())
    assert fingerprint(target) in (tmp_path / "config.json").read_text()
