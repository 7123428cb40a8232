"""Workers of Ray Data, also those that are killed. Skipped where Ray is not installed: `make scale` installs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import live
from eyas import tiny
from eyas.errors import EyasError, InputError, OptionError
from eyas.locks import locked_output
from processes import accept_interrupts, environment, finish, started, unused_port, wait_until

ray = pytest.importorskip("ray", reason="Ray is installed by `make scale`")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules use deprecated parts of pydantic
    from eyas_ray import fleet

from eyas.cli import run  # noqa: E402 - what follows needs Ray
from eyas_ray.data import Workers, piece_size, worked  # noqa: E402
from eyas_ray.options import Fleet  # noqa: E402
from eyas_ray.training import train_with  # noqa: E402
from eyas_train.commands import features, train  # noqa: E402 - what follows needs Ray
from eyas_train.commands.features import MakeWriter  # noqa: E402

pytestmark = live.MARKS


class Dying:
    """Squares numbers; its process is killed before it gives the outcome of some, once each."""

    def __init__(self, folder: Path, deadly: set[int]) -> None:
        self.folder, self.deadly = folder, deadly

    def __call__(self) -> Callable[[Sequence[int]], Iterator[tuple[int, int]]]:
        return self.squares

    def squares(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        for number in numbers:
            mark = self.folder / str(number)
            if number in self.deadly and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, number**2


def test_killed_workers_lose_nothing(tmp_path: Path) -> None:
    """Guards against items of a dead worker that nobody takes, or that two give outcomes of. Five kills."""
    deadly = {0, 7, 20, 21, 39}
    outcomes = list(worked(list(range(40)), Dying(tmp_path, deadly), Workers(2)))
    assert outcomes == [(number, number**2) for number in range(40)]
    assert {int(mark.name) for mark in tmp_path.iterdir()} == deadly


class Failing:
    """Fails when it is made or when it works: refuses what it is given, or has a fault of its own. Counts its calls."""

    def __init__(self, error: Exception | None, at_once: bool, calls: Path) -> None:
        self.error, self.at_once, self.calls = error, at_once, calls

    def __call__(self) -> Callable[[Sequence[Any]], Any]:
        if self.at_once:
            self.work([])
        return self.work

    def work(self, items: Sequence[Any]) -> Any:
        with self.calls.open("a") as calls:
            calls.write("x")
        if self.error is not None:
            raise self.error
        return len(None)  # type: ignore[arg-type]


FAULT = r"^a worker has failed with TypeError: object of type 'NoneType' has no len\(\) \(test_ray.py:\d+, the .*\)$"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OptionError("there is no such model"), OptionError, "no such model"),
        (InputError("1 cannot be used"), OptionError, "1 cannot be used"),
        (None, EyasError, FAULT),
    ],
    ids=["option", "input", "fault"],
)
def test_mistakes_and_faults_are_one_line(
    error: Exception | None, kind: type[EyasError], message: str, at_once: bool, tmp_path: Path
) -> None:
    """Guards against pages of Ray's tracebacks where the user has made a mistake or eyas has a fault, and against endless
    restarts: a fault is not tried again."""
    with pytest.raises(kind, match=message):
        list(worked([1], Failing(error, at_once, tmp_path / "calls"), Workers(1)))
    assert error is not None or (tmp_path / "calls").read_text() == "x"


class DyingMaker(Dying):
    """Its process is killed twice while it is made."""

    def __call__(self) -> Callable[[Sequence[int]], Iterator[tuple[int, int]]]:
        list(self.squares([-1]))
        list(self.squares([-2]))
        return self.squares


def test_workers_that_are_killed_while_they_load(tmp_path: Path) -> None:
    """Guards against a command that ends because a worker is lost before it can work."""
    outcomes = list(worked([3], DyingMaker(tmp_path, {-1, -2}), Workers(1)))
    assert outcomes == [(3, 9)]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("address", "others", "ended"),
    [("", {}, True), ("local", {}, True), ("auto", {}, True), ("auto", {"chat": 1}, False)],
)
def test_other_applications_of_a_cluster_stay(
    address: str, others: dict[str, int], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `eyas serve --replicas` that ends all of Ray Serve, and with it what others serve on the cluster,
    or that leaves its own application there when it is stopped at its start. Ray is a stand-in."""
    done, started = list[str](), dict[str, Any]()

    def run_application(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name, value in {**fleet.VARIABLES, "RAY_ADDRESS": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleet, "application", lambda make, fleet: None)
    monkeypatch.setattr(fleet, "ray", SimpleNamespace(init=started.update, shutdown=lambda: done.append("ray")))
    monkeypatch.setattr(fleet, "serve", SimpleNamespace(
        start=lambda **_: None,
        run=run_application,
        delete=done.append,
        status=lambda: SimpleNamespace(applications=others),
        shutdown=lambda: done.append("serve"),
    ))  # fmt: skip
    with (
        pytest.raises(KeyboardInterrupt),
        fleet.local_fleet(lambda: None, Fleet(replicas=3), "127.0.0.1", 8000),  # type: ignore[arg-type,return-value]
    ):
        pass
    assert done == ["eyas", *(["serve"] if ended else []), "ray"]
    assert started.get("num_cpus") == (None if address == "auto" else 3)


def test_a_server_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards `eyas serve --replicas` with a model that is not there against a traceback that does not say so."""
    for name, value in fleet.VARIABLES.items():
        monkeypatch.setenv(name, value)
    make: Any = Failing(OptionError("there is no such model"), True, tmp_path / "calls")
    with (
        pytest.raises(EyasError, match=r"^there is no such model$"),
        fleet.local_fleet(make, Fleet(), "127.0.0.1", unused_port()),
    ):
        pass


def test_pieces() -> None:
    """Guards against one worker that still has much to do when the others have nothing left."""
    assert piece_size(3, 2) == 1
    assert piece_size(160, 2) == 10
    assert piece_size(10**6, 2) == 64


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """A result without what differs from run to run."""
    return {name: value for name, value in line.items() if not name.endswith(("seconds", "ms", "per_second"))}


def written_chats(path: Path, count: int) -> Path:
    """Write chats of unequal length."""
    turns = [("user", "Tell me a story."), ("assistant", "There was a hat. ")]
    chats = [[{"role": role, "content": text * (1 + i % 5)} for role, text in turns] for i in range(count)]
    path.write_text("".join(json.dumps({"messages": chat, "id": i}) + "\n" for i, chat in enumerate(chats)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, but for those that are hidden."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


@dataclass(frozen=True)
class DyingWriter(MakeWriter):
    """Makes shards; its process is killed before the second one of some pieces, once each."""

    def __call__(self) -> Callable[[Sequence[int]], Iterator[int]]:
        write = super().__call__()

        def some(shards: Sequence[int]) -> Iterator[int]:
            for shard in shards:
                mark = self.folder.parent / f"killed-{shard}"
                if shard in (1, 3) and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield from write([shard])

        return some


EMBEDDED = live.EMBEDDED


def features_command(data: Path) -> list[str]:
    return ["features", "--data", str(data), "--layers", "1,3", "--max-length", "64", "--shard-mib", "0.2", "--output"]


@EMBEDDED
def test_features_of_workers_that_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that no shard is missing, doubled or different: after two kills the folder has the bytes that one process
    writes."""
    command = features_command(written_chats(tmp_path / "chats.jsonl", 24))
    assert run([*command, str(tmp_path / "one")]) == 0
    expected = contents(tmp_path / "one")
    assert len(expected) > 6
    monkeypatch.setattr(features, "MakeWriter", DyingWriter)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert run([*command, str(tmp_path / "several"), "--workers", "2"]) == 0
    assert contents(tmp_path / "several") == expected
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-1", "killed-3"}


@EMBEDDED
def test_a_datastore_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against documents in another order, and lines that cannot be used and are not told."""
    data = written_chats(tmp_path / "chats.jsonl", 40)
    data.write_text(data.read_text() + "{broken\n")
    texts = tmp_path / "texts.txt"
    texts.write_text("It was dark.<|endoftext|>It was bright, and the birds were singing.")
    command = ["datastore", "build", "--data", str(data), "--data", str(texts), "--output"]
    assert run([*command, str(tmp_path / "one")]) == 0
    told = capsys.readouterr().err.replace(str(tmp_path / "one"), "")
    assert "41: not JSON" in told
    assert run([*command, str(tmp_path / "several"), "--workers", "2"]) == 0
    assert capsys.readouterr().err.replace(str(tmp_path / "several"), "") == told
    assert contents(tmp_path / "several") == contents(tmp_path / "one")


def brief_training(data: Path) -> list[str]:
    """Two steps of two batches; the output's name and the number of processes are left out."""
    return [*training_command(data, 0, steps=2, workers=None), "--output"]


def check_same_training(two: Path, one: Path) -> None:
    """Two steps have the same losses and end with the same head, up to the rounding of sums."""
    assert len(losses(one)) == 2
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    head, expected = (load_file(folder / "model.safetensors") for folder in (two, one))
    assert head.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(head[name], values, rtol=1e-3, atol=1e-5, msg=name)


def node(numbers: Sequence[int]) -> Iterator[str]:
    """Say which node a number has come to."""
    import time

    for _ in numbers:
        time.sleep(0.3)
        yield ray.get_runtime_context().get_node_id()


@EMBEDDED
def test_two_nodes_write_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against work that only the caller's node can do, processes of two nodes that train apart, and relative
    paths that are looked for in a node's folder. Two nodes of one core, which Ray simulates."""
    from ray.cluster_utils import Cluster

    tiny.model().save_pretrained(tmp_path / "target")
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    shutil.copytree(tiny.HEADS["eagle3"], tmp_path / "head")
    target = ["--target", "target"]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # of the two nodes
    asked, chats = tmp_path / "asked.jsonl", written_chats(tmp_path / "chats.jsonl", 24)
    asked.write_text("".join(json.dumps({"id": i, "prompt": f"Tell me about {i}."}) + "\n" for i in range(4)))
    short = [*target, "--draft", "head", "--max-new-tokens", "6", "--tree.nodes", "6", "--tree.depth", "3", "--output"]
    commands = {
        "generate": ["generate", "--input", str(asked), *short],
        "regenerate": ["regenerate", "--data", str(asked), *short],
        "features": [*features_command(chats)[:-1], *target, "--output"],
        "datastore": ["datastore", "build", *target, "--data", str(chats), "--output"],
        "train": [*brief_training(chats)[:-1], *target, "--output"],
    }
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        for name, command in commands.items():
            assert run([*command, str(tmp_path / f"{name} one")]) == 0
    size = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        cluster.add_node(**size)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert len(set(worked(list(range(16)), lambda: node, Workers(2)))) == 2
        monkeypatch.chdir(tmp_path)
        for name, command in commands.items():
            assert run([*command, str(tmp_path / f"{name} two"), "--workers", "2"]) == 0
    finally:
        cluster.shutdown()
    for name in ("generate", "regenerate"):
        one, two = (list(map(without_times, lines(tmp_path / f"{name} {number}"))) for number in ("one", "two"))
        assert sorted(two, key=lambda line: line["id"]) == sorted(one, key=lambda line: line["id"])
    for name in ("features", "datastore"):
        assert contents(tmp_path / f"{name} two") == contents(tmp_path / f"{name} one")
    check_same_training(tmp_path / "train two", tmp_path / "train one")


@EMBEDDED
@pytest.mark.parametrize("command", ["generate", "regenerate"])
def test_the_same_lines_as_in_one_process(command: str, tmp_path: Path) -> None:
    """Guards against answers that depend on who gives them, and against another order than the input's; and a second
    run has nothing to do."""
    asked = [{"id": f"p{i}", "prompt": f"Tell me {what}."} for i, what in enumerate(("a story", "a joke", "the time"))]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in asked))
    source = "--input" if command == "generate" else "--data"
    common = [command, source, str(data), "--max-new-tokens", "8", "--tree.nodes", "6", "--tree.depth", "3"]
    one, several = tmp_path / "one.jsonl", tmp_path / "several.jsonl"
    assert run([*common, "--output", str(one)]) == 0
    assert run([*common, "--output", str(several), "--workers", "1"]) == 0
    expected = sorted(map(without_times, lines(one)), key=lambda line: str(line["id"]))
    assert list(map(without_times, lines(several))) == expected
    assert run([*common, "--output", str(several), "--workers", "1"]) == 0
    assert len(lines(several)) == len(asked)


@dataclass(frozen=True)
class DyingLoop(train._Loop):
    """A training whose second process is killed, or told to end, before its fourth step, once."""

    number = signal.SIGKILL

    def __call__(self, stop: Callable[[], bool]) -> str | None:
        from eyas_train import loop

        step, mark = loop.train_step, Path(self.head.output).parent / "killed"

        def deadly(setup: Any, loss_function: Any, optimizer: Any, state: Any) -> dict[str, float]:
            if (state.step, setup.group.rank) == (3, 1) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), self.number)
                while self.number == signal.SIGTERM and not stop():  # the process's first thread takes the signal
                    time.sleep(0.1)
            if setup.group.is_first:
                with Path(self.head.output).with_suffix(".steps").open("a") as steps:
                    print(state.step, file=steps)
            return step(setup, loss_function, optimizer, state)

        loop.train_step = deadly
        return super().__call__(stop)


@dataclass(frozen=True)
class ToldLoop(DyingLoop):
    number = signal.SIGTERM


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder / "log.jsonl") if "loss" in line]


def training_command(data: Path, save_every: int, steps: int = 5, workers: int | None = 2) -> list[str]:
    """So many steps, by default by two processes."""
    options = {"data": data, "method": "mtp", "precision": "float32", "accumulation": 2, "steps": steps, "device": "cpu",
               "log-every": 1, "eval-every": 0, "save-every": save_every, "heldout-tokens": 100,
               **({"workers": workers} if workers else {})}  # fmt: skip
    return ["train", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


@EMBEDDED
@pytest.mark.parametrize(
    ("loop", "save_every", "more"), [(ToldLoop, 0, ()), (DyingLoop, 2, ("--min-workers", "1"))], ids=["told", "killed"]
)
def test_a_lost_worker_leaves_the_loss_curve(
    loop: type[DyingLoop], save_every: int, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards that no step is left out or done twice: the losses are those of an undisturbed run, up to the rounding of
    sums (one process may go on alone). A machine that is taken away with notice saves before SIGTERM, and loses no step; a
    process that is killed goes on from the saved state, of step 2."""
    command = training_command(written_chats(tmp_path / "chats.jsonl", 24), save_every)
    assert run([*command, "--output", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(train, "_Loop", loop)
    assert run([*command, "--output", str(tmp_path / "disturbed"), *more]) == 0
    assert (tmp_path / "killed").exists()
    if loop is ToldLoop:
        assert (tmp_path / "disturbed.steps").read_text().split() == ["0", "1", "2", "3", "4"]
    assert losses(tmp_path / "disturbed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert len(losses(tmp_path / "whole")) == 5
    assert not (tmp_path / "disturbed" / ".ray").exists()


@EMBEDDED
def test_ctrl_c_saves_the_state(tmp_path: Path) -> None:
    """Guards against a training that Ctrl-C ends without a word, and without the steps since its last state. All
    processes of the session get the signal, as from a terminal."""
    data, head = written_chats(tmp_path / "chats.jsonl", 24), tmp_path / "head"
    parts = [*training_command(data, save_every=0), "--output", str(head)]
    parts[parts.index("--steps") + 1] = "100000"
    command, log = [sys.executable, "-m", "eyas", *parts], head / "log.jsonl"
    options = {"env": environment(), "preexec_fn": accept_interrupts, "start_new_session": True}
    with started(command, stderr=subprocess.PIPE, text=True, **options) as process:
        wait_until(lambda: log.exists() and '"loss"' in log.read_text(), process)
        os.killpg(process.pid, signal.SIGINT)
        told = finish(process)[1]
    assert process.returncode == 130, told
    place = re.escape(str(head))
    said = rf"eyas: interrupted: step (\d+) of 100000 is saved in {place}; the same command goes on from there"
    found = re.fullmatch(said, told.splitlines()[-1])
    assert found, told
    assert next(folder.name for folder in head.glob("state-*")).startswith(f"state-{found[1]}-")
    assert len(losses(head)) == int(found[1])


@dataclass(frozen=True)
class Mistaken:
    """A loop that one process ends with a mistake of the user's or a fault of ours, while the other one waits for it."""

    rank: int
    fault: bool = False
    calls: Path = Path(os.devnull)

    def __call__(self, stop: Callable[[], bool]) -> None:
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            with self.calls.open("a") as calls:
                calls.write("x")
            if self.fault:
                len(None)  # type: ignore[arg-type]
            raise InputError(f"process {self.rank} has no such file")
        dist.barrier()


@pytest.mark.parametrize(("rank", "fault"), [(0, False), (1, False), (1, True)])
def test_a_mistake_of_one_process_ends_all(rank: int, fault: bool, tmp_path: Path) -> None:
    """Guards against processes that wait for half an hour for one that has told its mistake, against a mistake that
    only the first process may tell, and against a training with a fault of ours that Ray begins a hundred times."""
    words = "a worker has failed with TypeError: object of type 'NoneType' has no len"
    with pytest.raises(EyasError, match=words if fault else f"process {rank} has no such file"):
        train_with(Mistaken(rank, fault, tmp_path / "calls"), Workers(2), tmp_path / "head", patience=1)
    assert not fault or (tmp_path / "calls").read_text() == "x"
    assert fault or not (tmp_path / "head" / ".ray").exists()


def test_one_training_at_a_time(tmp_path: Path) -> None:
    """Guards against a second command that removes Ray's files of the first one."""
    with locked_output(tmp_path, "training"), pytest.raises(InputError, match="is being written by"):
        train_with(Mistaken(0), Workers(1), tmp_path)


def test_numbers_of_workers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards against a training that ends when a process is lost, as those that are left cannot share its batches."""
    (tmp_path / "chats.jsonl").write_text("")
    files = ["--data", str(tmp_path / "chats.jsonl"), "--output", str(tmp_path / "head")]
    command = ["train", *files, "--accumulation", "4", "--min-workers", "2"]
    assert run([*command, "--workers", "4"]) == 2
    assert "3 processes do not divide the 4 batches of a step" in capsys.readouterr().err
    assert run([*command, "--workers", "1"]) == 2
    assert run(command) == 2


@EMBEDDED
def test_a_training_with_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against processes that train apart, each on its share of the features, and that look for the target in
    another folder than the command's."""
    monkeypatch.chdir(tmp_path)
    tiny.model().save_pretrained("target")
    tiny.tokenizer().save_pretrained("target")
    data = str(written_chats(Path("chats.jsonl"), 24))
    assert run(["features", "--target", "target", "--data", data, "--max-length", "64", "--output", "features"]) == 0
    training = " ".join(brief_training(Path(data))[:-1]).replace(f"--data {data}", "--features features").split()
    common = [*training, "--target", "target", "--output"]
    assert run([*common, "one"]) == 0
    assert run([*common, "two", "--workers", "2"]) == 0
    check_same_training(tmp_path / "two", tmp_path / "one")
