"""`eyas features`, and `eyas train --features`: agreed, resumed, divided, checked."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eyas.locks import locked_output
from eyas_train import alpha
from eyas_train.commands import features
from eyas_train.data import read
from eyas_train.store import FeatureStore

Run = Callable[..., Any]


@pytest.fixture
def command(chats: Path, tmp_path: Path) -> tuple[object, ...]:
    """About ten shards of all layers that an eagle3 head of these three and eagle1 read."""
    sizes = "--head.layers 0,1,2 --max-length 64 --heldout 0.005 --store-dtype float32 --shard-mib 0.09"
    return ("features", "--target", "llama", "--data", chats, "--output", tmp_path / "store", *sizes.split())


TRAINING = shlex.split(
    "--method eagle1 --steps 3 --batch-tokens 128 --warmup-steps 1 --eval-every 0 --precision float32"
)


@pytest.mark.slow
def test_the_same_examples_from_either_source(
    run: Run, command: tuple[object, ...], chats: Path, tmp_path: Path, world: Path
) -> None:
    """A user writes features and checks them. They hold the examples of the data, and the same ones are held out."""
    result = run(*command)
    assert result.exit_code == 0, (result.output, result.exception)
    for said in (
        f"{chats}:6: not JSON", "40 examples, ", "layers 0,1,2,4 of 48 numbers in float32; to be made: ", "GiB; free there: ",
        f"{tmp_path / 'store'} is complete: ",
    ):  # fmt: skip
        assert said in result.stderr
    assert "every checksum is right" in run("features", "--output", tmp_path / "store", "--verify").stderr
    stored = FeatureStore(tmp_path / "store").data()
    data = read(chats, AutoTokenizer.from_pretrained(world / "llama"), max_length=64, heldout=0.005)
    assert (list(stored.train), list(stored.heldout)) == (list(data.train), list(data.heldout))
    assert len(stored.heldout) == 2


@pytest.mark.slow
def test_half_of_it_can_be_trained_from(
    run: Run, command: tuple[object, ...], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two machines: its part is said, trained from with a note, and the other part completes it without reading
    the data again. Other settings, or other data, are refused."""
    monkeypatch.setattr(alpha, "chain_figures", lambda *arguments: None)  # takes longer than such a training
    first = run(*command, "--part", "1/2")
    shards = len(FeatureStore(tmp_path / "store").manifest.shards)
    assert f"to be made: {(shards + 1) // 2} of {shards} shards" in first.stderr
    assert "this part is done; " in first.stderr
    changed = run(*command, "--store-dtype", "bfloat16", "--heldout", 0.3)
    said = f"{tmp_path / 'store'} was begun with other settings: dtype float32 there, bfloat16 now; heldout 0.005"
    assert (changed.exit_code, said in changed.stderr.splitlines()[-1]) == (2, True)
    own = ("--method", "eagle3", "--head.layers", "0,1,2", "--features", tmp_path / "store")
    trained = run("train", "--target", "llama", "--output", tmp_path / "new", *TRAINING, *own)
    assert trained.exit_code == 0, trained.output
    assert "of its 40 examples are there: the same `eyas features` makes the rest" in trained.stderr
    assert json.loads((tmp_path / "new" / "training.json").read_text())["features"]["layers"] == [0, 1, 2, 4]
    second = run(*command, "--part", "2/2")
    assert "is complete" in second.stderr
    assert "not JSON" not in second.stderr
    assert run(*command).stderr.count("\n") == 1  # nothing is left to do
    chats.write_text(chats.read_text() + "\n")
    assert "the data was chat.jsonl, with other contents than now" in run(*command).stderr


@pytest.mark.slow
def test_ctrl_c_keeps_whole_shards(
    run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = FeatureStore.write_shard, list[int]()

    def interrupted(self: FeatureStore, shard: int, found: Any) -> None:
        calls.append(shard)
        if len(calls) == 3:
            raise KeyboardInterrupt
        put(self, shard, found)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "write_shard", interrupted)
        result = run(*command)
    assert result.exit_code == 130
    shards = len(FeatureStore(tmp_path / "store").manifest.shards)
    assert result.stderr.splitlines()[-1] == (
        f"eyas: interrupted: 2 of {shards} shards are whole in {tmp_path / 'store'}; the same command goes on"
    )
    again = run(*command)
    assert f"to be made: {shards - 2} of {shards} shards" in again.stderr
    assert "is complete" in again.stderr


@pytest.mark.slow
def test_much_is_asked_for(
    run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written before the answer; a script has to say --yes."""
    monkeypatch.setattr(features, "LARGE_GIB", 1e-5)
    assert "is a lot: give --yes if that is intended" in run(*command).stderr
    monkeypatch.setattr(features, "_on_terminal", lambda: True)
    asked = run(*command, stdin="n\n")
    assert asked.exit_code == 130
    assert "Write 0.0 GiB into" in asked.stderr
    assert "nothing was written" in asked.stderr
    assert not (tmp_path / "store").exists()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
        assert "GiB does not fit into the 0.00 GiB that are free" in run(*command, "--yes").stderr
    assert not (tmp_path / "store").exists()
    assert run(*command, "--part", "1/4", stdin="y\n").exit_code == 0
    assert run(*command, "--yes").exit_code == 0


@pytest.mark.slow
def test_workers_divide_the_shards(
    run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, of which one is killed: it is said which, how to go on, and the other one finishes. The same command
    makes the rest, with the bytes that one process writes. The target that made the plan is freed before the first
    worker starts: with several devices it would sit on the first one beside that worker's own."""
    models, load = list[Any](), features.load_target

    def loaded(*arguments: Any) -> Any:
        llm = load(*arguments)
        models.append(weakref.ref(llm.target.model))
        return llm

    monkeypatch.setattr(features, "load_target", loaded)
    monkeypatch.setattr(features, "MakeWriter", DyingWriter)
    store = tmp_path / "store"
    result = run(*command, "--workers", 2, "--device", "cpu,cpu")
    assert result.exit_code == 2, (result.output, result.exception)
    shards = len(FeatureStore(store).manifest.shards)
    assert result.stderr.splitlines()[-1] == (
        f"eyas: error: worker 1 of 2: ended by signal 9; {shards // 2} of {shards} shards are whole. "
        "Run the same command again, it goes on"
    )
    assert models[0]() is None
    monkeypatch.undo()
    assert "is complete" in run(*command, "--workers", 2).stderr
    made = {path.name: path.read_bytes() for path in store.glob("shard-*")}
    assert len(made) == shards
    shutil.rmtree(store)
    assert run(*command).exit_code == 0
    assert made == {path.name: path.read_bytes() for path in store.glob("shard-*")}


@dataclass(frozen=True)
class DyingWriter(features.MakeWriter):
    """Is killed before the first shard."""

    def __call__(self) -> Any:
        write = super().__call__()
        return lambda shards: os.kill(os.getpid(), 9) if 0 in shards else write(shards)


@pytest.mark.slow
def test_processes_of_one_folder_do_not_refuse_each_other(
    run: Run, command: tuple[object, ...], tmp_path: Path
) -> None:
    """Bug: each part locked the whole folder for a moment when it began, so one of them ended where two did so at once. A
    part that another process makes is refused."""
    assert run(*command, "--part", "1/4").exit_code == 0
    store = tmp_path / "store"
    with locked_output(store):
        made = run(*command, "--part", "3/4")
        assert made.exit_code == 0, made.output
    with locked_output(store, "4-4"):
        refused = run(*command, "--part", "4/4")
    assert (refused.exit_code, f"{store} is being written by process {os.getpid()} on " in refused.stderr) == (2, True)


BAD = {
    "no data": (("features", "--output", "o"), "option --data is missing"),
    "data that is nowhere": (
        ("features", "--output", "o", "--data", "./nowhere.jsonl"),
        "nowhere.jsonl does not exist",
    ),
    "nothing to verify": (("features", "--output", "o", "--verify"), "holds no features"),
    "a part of nothing": (("--part", "3/2"), "--part is like 2/4"),
    "layers that are words": (("--layers", "last"), "--layers are whole numbers"),
    "layers outside": (("--layers", "0,5"), "--layers are from 0 to 4"),
    "an unknown method": (("--method", "eagle9"), "unknown method 'eagle9'"),
    "a method without a net": (("--method", "eagle3,vanilla"), "vanilla has nothing to train"),
    "an unknown option": (("--method", "eagle1"), "unknown option 'head.layers'"),
    "too few layers": (("--head.layers", "auto"), "pass layers with --head.layers"),
    "small batches": (("--batch-tokens", 16), "batch_tokens is 16, the longest example"),
    "no tokenizer": (("--target", "bare"), "no tokenizer"),
    "no such device": (("--device", "tpu9,tpu8"), "device 'tpu9' cannot be used"),
    "two sources": (
        ("train", "--data", "chat.jsonl", "--features", "store", "--output", "o"),
        "give only one of --data",
    ),
    "no features": (("train", "--features", "./nowhere", "--output", "o"), "'nowhere' holds no features"),
}


@pytest.mark.quick("a part of nothing", "nothing to verify", "no data")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(run: Run, command: tuple[object, ...], name: str) -> None:
    arguments, words = BAD[name]
    result = run(*arguments) if arguments[0] in ("features", "train") else run(*command, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("eyas: error: ")
    assert words in last


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    """By name: layers that are not there, other lengths, another tokenizer."""
    assert run(*command[:7], "--method", "eagle1", "--max-length", 64).exit_code == 0
    train = ("train", "--target", "llama", "--output", tmp_path / "new", *TRAINING, "--features", tmp_path / "store")
    missing = run(*train, "--method", "eagle3", "--head.layers", "0,1,2")
    assert missing.stderr.splitlines()[-1].endswith("make features with `eyas features --layers 0,1,2,4`")
    assert "was made with max_length 64, so it cannot be 32" in run(*train, "--max-length", 32).stderr
    held = json.loads((tmp_path / "store" / "manifest.json").read_text())
    held["tokenizer"]["chat template"] = "0" * 64
    del held["sha256"]
    held["sha256"] = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()  # as if it had been made so
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(held))
    assert "was made with another tokenizer" in run(*train).stderr
