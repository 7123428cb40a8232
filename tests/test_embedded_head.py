"""The chats that heads are judged on."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest


def write_chats(path: Path, texts: list[str]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]})
        for text in texts
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_no_head_is_judged_on_a_chat_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a held-in chat that is in the training data too is asked."""
    every = write_chats(tmp_path / "every", [str(number) for number in range(9)])
    held = write_chats(tmp_path / "held", ["a", "4", "b", "c"])
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "runs"))
    compare = importlib.import_module("compare_heads")
    found = compare.asked(Namespace(chats=held, trained_on=every, skip=1, limit=9))
    assert [prompt.messages[0]["content"] for prompt in found] == ["b", "c"]
