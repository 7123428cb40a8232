"""Files of a run that are read back: a changed bit is found, missing or wrong values are refused in
one line, and two runs never share a folder."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas import checkpoints
from eyas.errors import EyasError, InputError
from eyas.locks import locked_output
from eyas_train.data import Batches
from eyas_train.dist import SingleProcess
from eyas_train.reporter import TrainLog, read_log
from eyas_train.state import load_tensors, load_values, save_state, saved_states, whole_tensors
from train import toy
from train.states import REMOVED, change_values, copy_state, read_state


@pytest.fixture(autouse=True)
def one_thread_and_toy_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(checkpoints, "save", toy.save_toy)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", toy.save_toy)
        torch.set_num_threads(1)
        toy.run(folder, steps=4, save_every=2)
    return folder


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    """Guards small models, whose lm_head is their table of embeddings: the writer refused two names of one tensor."""
    table, group = torch.arange(6.0).view(2, 3), SingleProcess()
    saved = {"a": table, "b": table, "c": table + 1}
    save_state(tmp_path, {"step": 1, "evaluated_step": 0}, saved, group)
    path = saved_states(tmp_path)[-1]
    found = whole_tensors(path)
    load_tensors(path, found, group)
    assert is_same(found, saved)


@pytest.mark.slow
def test_a_flipped_bit_is_found(tmp_path: Path, trained: Path) -> None:
    """One bit of every 13th byte of every file of the state, so that all parts are hit: the state is refused. No false
    alarm."""
    state = copy_state(trained, tmp_path)
    rng = random.Random(0)
    read_state(tmp_path)
    for file in state.iterdir():
        content = file.read_bytes()
        for place in range(0, len(content), 13):
            damaged = bytearray(content)
            damaged[place] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(InputError, match="is damaged"):
                load_values(state, SingleProcess())
        file.write_bytes(content)
    assert is_same(read_state(tmp_path), read_state(trained))


@pytest.mark.parametrize(
    "changes", [{"position": REMOVED}, {"position": [1]}, {"best": {"step": 1}}, {"seconds": None}]
)
def test_a_state_with_wrong_values_is_one_line(tmp_path: Path, trained: Path, changes: dict[str, Any]) -> None:
    """Values that no run has written: a line that names the state, never a traceback."""
    change_values(copy_state(trained, tmp_path), **changes)
    with pytest.raises(EyasError, match="state-4-4 is not a whole state") as raised:
        toy.run(tmp_path, steps=4, save_every=2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kept", ["", "net.inner.", "optimizer."])
def test_a_state_without_some_tensors_is_one_line(tmp_path: Path, trained: Path, kept: str) -> None:
    """Another net's, or a state whose tensors were changed by hand."""
    state = copy_state(trained, tmp_path)
    (file,) = state.glob("shard-*")
    with safe_open(file, "pt") as stored:
        tensors = {key: stored.get_tensor(key) for key in stored.keys() if key.startswith(kept) and kept}  # noqa: SIM118
        metadata = stored.metadata()
    save_file(tensors, file, metadata)
    change_values(state)
    with pytest.raises(InputError, match=r"state-4-4 holds other tensors than this training has") as raised:
        toy.run(tmp_path, steps=4, save_every=2)
    assert "\n" not in str(raised.value)


def test_other_files_are_no_states(tmp_path: Path, trained: Path) -> None:
    """Bug: a traceback where somebody has packed a state beside it."""
    state = copy_state(trained, tmp_path)
    for name in ("state-4-4.tar.gz", "state-of-the-run.txt", "state-10-1x"):
        (tmp_path / name).write_bytes(b"any")
    assert saved_states(tmp_path) == [state]


def test_one_state_stays(tmp_path: Path) -> None:
    """Guard that a run keeps its newest state only, and removes a state that a killed process has written in part."""
    (tmp_path / ".state-tmp").mkdir(parents=True)
    (tmp_path / ".state-tmp" / "shard-00007-model-00001-of-00001.safetensors").write_bytes(b"half")
    toy.run(tmp_path, steps=4, save_every=2)
    assert [path.name for path in tmp_path.glob("*state-*")] == ["state-4-4"]
    assert not (tmp_path / ".state-tmp").exists()
    files = sorted(path.name for path in (tmp_path / "state-4-4").iterdir())
    assert files == ["shard-00001-model-00001-of-00001.safetensors", "values.json"]


def test_the_next_batches_across_epochs() -> None:
    """The place in the data is (epoch, index); an index past the end, as of a damaged file, is the
    beginning of the next epoch."""
    batches = Batches(toy.examples(), 48, seed=3)
    first, second = batches.plan(0), batches.plan(1)
    count = len(first)
    assert batches.take((0, count - 1), 3) == ([first[-1], second[0], second[1]], (1, 2))
    assert batches.take((0, count), 1) == ([second[0]], (1, 1)) == batches.take((0, count + 7), 1)


@pytest.mark.parametrize("line", ["[1]", '{"step": "2"}', '{"step": 2, "heldout": 5}', '{"step": 2}}'])
def test_log_lines_that_are_none(tmp_path: Path, trained: Path, line: str) -> None:
    """A line of the log that is no entry is named, when the run is resumed."""
    copy_state(trained, tmp_path)
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1, "loss": 2.0}}\n{line}\n')
    with pytest.raises(InputError, match=r"log\.jsonl:2: .*delete the line") as raised:
        toy.run(tmp_path, steps=4, save_every=2)
    assert "\n" not in str(raised.value)
    # a killed run may leave half a line
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert toy.run(tmp_path, steps=4, save_every=2).step == 4
    assert read_log(tmp_path)[0] == {"step": 1, "loss": 2.0}


def test_the_log_keeps_what_the_state_knows(tmp_path: Path) -> None:
    """Lines after the state's step go, and evaluations after the last one that the state knows."""
    log = TrainLog(tmp_path, 0, 0)
    evaluations = [{"step": step, "heldout": {"loss": 1.0}} for step in (3, 4)]
    entries = [{"step": 2, "loss": 1.0}, evaluations[0], {"step": 4, "loss": 1.0}, evaluations[1]]
    for entry in [*entries, {"step": 6, "loss": 1.0}]:
        log.add(entry)
    TrainLog(tmp_path, 5, 3)
    assert read_log(tmp_path) == entries[:3]


HOLD = """
import sys
from eyas.locks import locked_output
with locked_output(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that writes into the folder, once this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    """Two runs interleaved their log lines and overwrote each other's state. The message names the
    other process; when that has gone, even by kill -9, the folder is free."""
    process = holder(tmp_path)
    try:
        with pytest.raises(InputError, match=str(process.pid)) as raised:
            toy.run(tmp_path, steps=2, warmup_steps=1)
        assert "\n" not in str(raised.value)
        assert not saved_states(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert toy.run(tmp_path, steps=2, warmup_steps=1).step == 2
    with locked_output(tmp_path):
        pass  # free again after a run
