"""The machine's card."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from eyas.hardware.machine import Snapshot
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

    def git(*command: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *named, *command], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        git("init", "-q")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    assert commit(tmp_path) is None, "no commit yet"
    (tmp_path / "x").write_text("1")
    git("add", "x")
    git("commit", "-q", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40
    assert commit(tmp_path) == head
    (tmp_path / "x").write_text("2")
    assert commit(tmp_path) == f"{head}+"
    (tmp_path / "inner").mkdir()
    assert commit(tmp_path / "inner") is None
