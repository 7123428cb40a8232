"""Two processes are one: the same losses and weights as a process alone, whoever begins and whoever goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas import checkpoints
from eyas.errors import OptionError
from eyas.locks import locked_output
from eyas_train import dist
from eyas_train.config import TrainConfig
from train import real
from train.states import read_state
from train.together import together

pytestmark = pytest.mark.slow  # processes of their own


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", checkpoints.save)  # put back what the toy's run changes
        for name in ("toy", "eagle1", "eagle3"):
            folder = tmp_path_factory.mktemp(name)
            found[name] = folder, real.stopped_run(name, folder)
            patch.undo()
    return found


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is Tensor
        said = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=said)


def assert_same_run(folder: Path, expected: Path) -> None:
    """Every loss, gradient norm and held-out figure, the weights and the optimiser, up to rounding."""
    for mine, theirs in zip(log(folder), log(expected), strict=True):
        mine, theirs = mine.get("heldout", mine), theirs.get("heldout", theirs)
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    left, right = read_state(folder), read_state(expected)
    assert_close(left["net"], right["net"])
    assert (left["step"], left["position"], left["tokens"], left["best"]["step"]) == (
        right["step"], right["position"], right["tokens"], right["best"]["step"],
    )  # fmt: skip
    assert_close(left["best"]["net"], right["best"]["net"])
    assert_close(left["optimizers"], right["optimizers"])


@pytest.mark.cover
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["toy", "eagle1", "eagle3"])
def test_two_processes_are_one(tmp_path: Path, alone: Any, name: str, parallel: str) -> None:
    """Guards sums over processes: of losses, counts and gradients, the norm that is clipped, who
    reads which batch with which noise."""
    folder, expected = alone[name]
    first, second = together(real.stopped_run, name, tmp_path, parallel=parallel)
    assert_same_run(tmp_path, folder)
    assert_close(first["net"], expected["net"])
    assert all(torch.equal(first["net"][key], value) for key, value in second["net"].items())  # bits: they decide alike
    outcomes = [(x["outcome"].step, x["outcome"].best_step, x["outcome"].heldout) for x in (first, second)]
    assert outcomes[0] == outcomes[1]
    assert json.loads((tmp_path / "training.json").read_text())["processes"] == 2


@pytest.mark.parametrize(("before", "after"), [("alone", "fsdp"), ("fsdp", "alone"), ("ddp", "fsdp")])
def test_another_number_of_processes_goes_on(tmp_path: Path, alone: Any, before: str, after: str) -> None:
    """Stopped by Ctrl-C in the first process alone: both stop after the same step, and what is saved is whole."""
    for kind, stop in ((before, 3), (after, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoints, "save", checkpoints.save)
            if kind == "alone":
                found = real.stopped_run("eagle3", tmp_path, stop)
            else:
                found = together(real.stopped_run, "eagle3", tmp_path, stop, parallel=kind)[1]
        assert (found["outcome"].step, found["outcome"].interrupted) == ((3, True) if stop else (6, False))
    assert_same_run(tmp_path, alone["eagle3"][0])


def test_muon_with_several_processes(tmp_path: Path) -> None:
    """On shards torch's rounds sums to bfloat16 and is off by a twentieth of an update: refused. On
    whole matrices it is exact."""
    options = {"optimizer": "muon", "steps": 4}
    real.stopped_run("eagle3", tmp_path / "alone", **options)
    together(real.stopped_run, "eagle3", tmp_path / "two", 2, parallel="ddp", **options)
    assert real.stopped_run("eagle3", tmp_path / "two", **options)["outcome"].step == 4
    assert_same_run(tmp_path / "two", tmp_path / "alone")
    with pytest.raises(OptionError, match=r"muon works on whole matrices.*parallel ddp"):
        TrainConfig(optimizer="muon", accumulation=2).check_processes(2)


def test_a_bad_number_in_one_process_stops_both(tmp_path: Path) -> None:
    """The sum is bad for both; neither saves, and neither waits for the other."""
    said = together(real.broken_run, tmp_path)
    assert said[0] == said[1]
    assert "NaN or infinite at step 4: start again with a lower lr; the state of step 3 stays" in said[0]
    assert read_state(tmp_path)["step"] == 3


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    """In the middle of a step; the other one says what is kept, and a process alone goes on from there."""
    told = r"another process of this run has ended; the state of step \d stays in .*. The same command goes on"
    with pytest.raises(RuntimeError, match=told):
        together(real.dying_run, tmp_path)
    assert real.stopped_run("eagle1", tmp_path)["outcome"].step == 6


def test_a_process_that_dies_behind_the_first_state(tmp_path: Path) -> None:
    """The state is on disk, whoever was told: the other process names it, and a process alone goes on from there."""
    with pytest.raises(RuntimeError, match=r"another process of this run has ended; the state of step 1 stays in "):
        together(real.dying_run_behind_state, tmp_path)
    assert real.stopped_run("eagle1", tmp_path)["outcome"].step == 6


def test_a_folder_that_another_run_has(tmp_path: Path) -> None:
    """Bug: the first process tells why in a line, and each other one a page about a connection."""
    told = r"is being written by (?s:.*)EyasError: another process of this run has ended; no state had been saved yet"
    with locked_output(tmp_path), pytest.raises(RuntimeError, match=told):
        together(real.head_run, "eagle1", tmp_path)


def test_processes_that_cannot_share_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anyone waits for anyone."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    told = "3 processes do not divide the 2 batches of a step: accumulation must be a multiple of 3"
    with pytest.raises(OptionError, match=told):
        real.head_run("eagle1", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(OptionError, match=r"the processes cannot meet .*; start them with torchrun"):
        real.head_run("eagle1", tmp_path)


def test_one_process_needs_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert type(dist.join(torch.device("cpu"), "fsdp")) is dist.SingleProcess
    for size in ("none", "-1", "2.0"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(OptionError, match=f"WORLD_SIZE must be a whole number.*it is '{size}'"):
            dist.join(torch.device("cpu"), "fsdp")
    monkeypatch.delenv("WORLD_SIZE")
    assert TrainConfig().check_processes(1) is None  # type: ignore[func-returns-value]
