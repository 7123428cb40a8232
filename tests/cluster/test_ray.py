"""Workers of Ray Data, also those that are killed. Skipped where Ray is not installed: `make scale` installs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas import tiny
from eyas.errors import InputError, OptionError

ray = pytest.importorskip("ray", reason="Ray is installed by `make scale`")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file

from eyas.cli import run  # noqa: E402 - what follows needs Ray
from eyas.cluster.data import Workers, piece_size, worked  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]


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


class Refusing:
    """Cannot be made, or refuses what it is given."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def __call__(self) -> Callable[[Sequence[Any]], Any]:
        if self.at_once:
            raise OptionError("there is no such model")
        return self.refuse

    def refuse(self, items: Sequence[Any]) -> Any:
        raise InputError(f"{items[0]} cannot be used")


@pytest.mark.parametrize(("at_once", "message"), [(True, "no such model"), (False, "1 cannot be used")])
def test_mistakes_are_one_line(at_once: bool, message: str) -> None:
    """Guards against pages of Ray's tracebacks where the user has made a mistake, and against endless restarts."""
    with pytest.raises(OptionError, match=message):
        list(worked([1], Refusing(at_once), Workers(1)))


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


@pytest.mark.skipif(not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not here")
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


@pytest.mark.skipif(not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not here")
def test_a_training_with_two_processes(tmp_path: Path) -> None:
    """Guards against processes that train apart, each on its share: the losses are those of one process, up to the
    rounding of sums."""
    turns = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "There was a hat. " * 9}]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": turns, "id": i}) + "\n" for i in range(24)))
    common = ["train", "--data", str(data), "--method", "mtp", "--accumulation", "2", "--steps", "2", "--device", "cpu"]
    common += ["--log-every", "1", "--eval-every", "0", "--heldout-tokens", "200", "--output"]
    assert run([*common, str(tmp_path / "one")]) == 0
    assert run([*common, str(tmp_path / "two"), "--workers", "2"]) == 0
    one, two = (
        [line["loss"] for line in lines(tmp_path / name / "log.jsonl") if "loss" in line] for name in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-4)
    assert len(one) == 2
