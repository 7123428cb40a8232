"""The stages of runs/make_tiny.py that gave the embedded EAGLE-3 head the whole vocabulary, and the
chats that it is judged on."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import checkpoints, tiny
from eyas.drafters.eagle3 import DRAFT_IDS
from golden import needs_weights


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script of runs/, and returns it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "runs"))

    def called(name: str, *arguments: object) -> Any:
        script = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        script.main()
        return script

    return called


def write_chats(path: Path, key: str, texts: list[str]) -> Path:
    chats = ([{"role": role, "content": text} for role in ("user", "assistant")] for text in texts)
    path.write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return path


def test_no_head_is_trained_on_the_chats_that_judge_it(run: Any, tmp_path: Path) -> None:
    """Bug: a held-in chat that is in the training data too is asked, or a second part of the
    questions repeats the first."""
    texts, asked = [str(number) for number in range(9)], set[str]()
    every = write_chats(tmp_path / "every", "conversations", texts)
    held = write_chats(tmp_path / "held", "conversations", ["a", "4", "b", "c"])
    for skip in (0, 5):
        part = tmp_path / f"part{skip}"
        run("make_tiny", *f"questions --chat {every} --without {held} --skip {skip} --limit 5 --output {part}".split())
        asked |= {json.loads(line)["conversations"][0]["content"] for line in part.read_text().splitlines()}
    assert asked == {*texts} - {"4"}
    compare = importlib.import_module("compare_heads")
    found = compare.asked(compare.argparse.Namespace(chats=held, trained_on=every, skip=1, limit=9))
    assert [prompt.messages[0]["content"] for prompt in found] == ["b", "c"]


@pytest.mark.slow
@needs_weights
def test_a_narrowed_and_an_extended_head(run: Any, tmp_path: Path) -> None:
    """Guards that a head over frequent tokens keeps the rows of these, and that rows for all other
    tokens leave them as they are."""
    own = write_chats(tmp_path / "own", "messages", ["time time time", "time day"])
    whole = checkpoints.load(tiny.HEADS["eagle3"])
    to_narrow = ("--model", tiny.HEADS["eagle3"], "--chat", own, "--size", 3, "--output", tmp_path / "narrow")
    run("make_tiny", "narrow", *to_narrow)
    narrow = checkpoints.load(tmp_path / "narrow")
    ids_v = narrow.tensors[DRAFT_IDS]
    (end,) = tiny.tokenizer()("<|end|>", add_special_tokens=False)["input_ids"]
    assert narrow.config["draft_vocab_size"] == len(ids_v) == 3
    assert end in ids_v
    assert torch.equal(narrow.tensors["head.weight"], whole.tensors["head.weight"][ids_v])
    run("make_tiny", "extend", "--model", tmp_path / "narrow", "--output", tmp_path / "whole")
    extended = checkpoints.load(tmp_path / "whole")
    assert DRAFT_IDS not in extended.tensors
    assert extended.config["draft_vocab_size"] == len(extended.tensors["head.weight"]) == 8192
    assert torch.equal(extended.tensors["head.weight"][ids_v], narrow.tensors["head.weight"].float())
