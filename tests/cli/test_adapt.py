"""`--adapt`: a head that learns from what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_a_head_learns_and_is_saved(answer: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Bugs: the options do not reach the learner; the text changes; the head that was saved cannot be used."""
    plain = answer("hello", "--draft", "head", "--tree", "fixed")
    saved = tmp_path / "saved"
    learning = ("--adapt", "--adapt-percent", 1e9, "--adapt-save", saved)
    assert answer("hello", "--draft", "head", "--tree", "fixed", *learning)["token_ids"] == plain["token_ids"]
    assert json.loads((saved / "adapt.json").read_text())["steps"] > 0
    again = answer("hello", "--draft", saved, "--tree", "fixed")
    assert (again["method"], again["token_ids"]) == ("eagle2", plain["token_ids"])


def test_what_cannot_be_done_is_refused(refused: Callable[..., str], world: Path) -> None:
    """One line each, and the given head is not touched."""
    before = {file.name: file.read_bytes() for file in (world / "head").iterdir()}
    asked = ("generate", "--target", "llama", "--max-new-tokens", 8, "hello")
    assert "--adapt-save needs --adapt" in refused(*asked, "--draft", "head", "--adapt-save", "x")
    assert "only heads" in refused(*asked, "--adapt")
    assert {file.name: file.read_bytes() for file in (world / "head").iterdir()} == before
