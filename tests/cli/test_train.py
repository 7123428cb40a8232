"""`eyas train`: from a chat file to a head that generates, interrupted and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from eyas.train import loop

Run = Callable[..., Any]


@pytest.fixture
def command(tmp_path: Path) -> tuple[object, ...]:
    """Six steps of training."""
    chats = [[("user", f"what is {i}"), ("assistant", f"it is the number {i}")] for i in range(30)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    sizes = ("--steps", 6, "--batch-tokens", 128, "--max-length", 128, "--warmup-steps", 1, "--eval-every", 0, "--save-every", 1)
    return ("train", "--target", "llama", "--data", tmp_path / "chat.jsonl", "--output", tmp_path / "new", "--lr", 1e-3, *sizes)


def test_a_head_is_trained_and_used(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    result = run(*command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"{tmp_path / 'chat.jsonl'}:6: not JSON" in result.stderr
    assert "1 of 31 lines cannot be used" in result.stderr
    assert f"{tmp_path / 'new'} holds the head of step" in result.stderr.splitlines()[-1]
    assert "0-alpha" in result.stderr
    record = json.loads((tmp_path / "new" / "training.json").read_text())
    assert (record["method"], record["steps"], record["config"]["lr"]) == ("eagle1", 6, 1e-3)
    assert record["data"]["files"] == ["chat.jsonl"]
    assert len(record["data"]["sha256"]) == 64
    used = run("generate", "--target", "llama", "--draft", tmp_path / "new", "hello", "--max-new-tokens", 8, "--json")
    assert used.exit_code == 0
    assert used.stderr == ""
    assert json.loads(used.stdout)["method"] == "eagle2"
    more = run(*command[:-2], "--restart", "--init", tmp_path / "new", "--output", tmp_path / "more", "--steps", 2)
    assert more.exit_code == 0, more.output


def test_interrupted_and_resumed_is_the_same_head(
    run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the third step; the same command goes on, to the same bits as without it."""
    assert run(*command).exit_code == 0
    whole = load_file(tmp_path / "new" / "model.safetensors")
    advance = loop._Run.advance

    def interrupted(self: Any) -> None:
        advance(self)
        if self.step == 3:
            raise KeyboardInterrupt

    other = tuple(tmp_path / "other" if part == tmp_path / "new" else part for part in command)
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "advance", interrupted)
        result = run(*other)
    assert result.exit_code == 130
    assert f"eyas: interrupted: step 3 of 6 is saved in {tmp_path / 'other'}; the same command goes on" in result.stderr
    resumed = run(*other)
    assert resumed.exit_code == 0
    assert "resumed at step 3 of 6" in resumed.stderr
    again = load_file(tmp_path / "other" / "model.safetensors")
    assert all(bool((again[name] == value).all()) for name, value in whole.items())


BAD = {
    "a method that cannot": (("--method", "vanilla"), "the method 'vanilla' has nothing to train; these have: eagle1"),
    "an impossible rate": (("--lr", -1), "lr must be 0 or more; got -1.0"),
    "an unknown schedule": (("--schedule", "linaer"), "--schedule"),
    "two lengths": (("--epochs", 2), "steps and epochs each say how long"),
    "broken betas": (("--betas", "0.9;0.95"), "no list of numbers"),
    "no data": (("--data", "./nowhere.jsonl"), "./nowhere.jsonl does not exist"),
    "an output that is a file": (("--output", "chat.jsonl"), "cannot write"),
    "no head to begin with": (("--init", "./nowhere"), "draft head ./nowhere: there is no such folder"),
    "an option of another method": (("--tree.nodes", 4), "unknown option 'tree.nodes'"),
    "no tokenizer": (("--target", "bare"), "no tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(run: Run, command: tuple[object, ...], name: str, tmp_path: Path) -> None:
    arguments, words = BAD[name]
    given = [tmp_path / a if a == "chat.jsonl" else a for a in arguments]
    result = run(*command, *given)
    assert result.exit_code == 2, (result.output, result.exception)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("eyas: error: ")
    assert words in last
