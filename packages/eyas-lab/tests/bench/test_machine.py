"""The machine's card; bytes and operations that a pass needs, and those that the machine delivers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.hardware.machine import Snapshot
from eyas_lab.bench import cost
from eyas_lab.bench.card import card, commit

BEFORE = Snapshot(seconds=100.0, all_seconds=1000.0, own_seconds=50.0, load=0.5)


def test_the_card_is_json_and_whole() -> None:
    """Bug: a figure on the card cannot be written down, or is missing where this system surely tells it."""
    found = json.loads(json.dumps(card(BEFORE, dtype="float32", device="cpu")))
    assert found["cpu"]
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_bytes"] > 1 << 28
    assert found["threads"] >= 1
    assert (found["dtype"], found["device"], found["load_before"]) == ("float32", "cpu", 0.5)
    assert {"eyas", "python", "torch", "transformers"} <= found["versions"].keys()
    assert card()["load_before"] is None


def test_the_commit_is_of_the_clone_and_says_when_files_were_changed(tmp_path: Path) -> None:
    """Bug: an installed eyas names the commit of whatever repository its environment lies in; or
    changed files pass as the commit's."""
    assert commit(tmp_path) is None
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*command: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        words = ["git", "-C", str(tmp_path), *named, *command]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert commit(tmp_path) is None, "no commit yet"
    (tmp_path / "x").write_text("1")
    git("add", "x")
    git("commit", "-q", "-m", "x")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "x").write_text("2")
    assert commit(tmp_path) == f"{git('rev-parse', 'HEAD')}+"
    (tmp_path / "inner").mkdir()
    assert commit(tmp_path / "inner") is None


class _Event:
    """An event of a GPU whose clock a test sets: work takes two milliseconds on the device, and a
    second on the host."""

    now_ms = at_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = _Event.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return end.at_ms - self.at_ms


def test_work_on_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's launch is counted, so the bandwidth looks lower than it is, and the share of
    the bound higher."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def work() -> None:
        _Event.now_ms += 2.0

    assert cost.device_seconds(work, torch.device("cuda")) == pytest.approx(0.002)


@pytest.mark.slow
def test_random_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: ones or zeros, on which hardware can be faster than on data."""
    read = list[Any]()

    def seconds(work: Any, device: torch.device) -> float:
        (numbers,) = (cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, torch.Tensor))
        read.append(numbers)
        return 0.5

    monkeypatch.setattr(cost, "device_seconds", seconds)
    assert cost.bandwidth(torch.device("cpu")) == 2**26 * 4 / 0.5
    assert len(read) == cost.REPEATS
    assert 0.2 < float(read[0][:1000].std()) < 0.4
