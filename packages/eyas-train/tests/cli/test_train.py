"""`eyas train`: from a chat file to a head that generates, interrupted and resumed, alone and by two processes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import checkpoints
from eyas.locks import locked_output

pytestmark = pytest.mark.slow

Run = Callable[..., Any]
# options of eagle3
OWN = {"--ttt.steps": 2, "--head.layers": "0,2,3", "--tree.nodes": 8, "--tree.depth": 3, "--tree.branch": 3}


@pytest.fixture
def command(tmp_path: Path) -> tuple[object, ...]:
    """Six steps of training a head of EAGLE-3."""
    chats = [[("user", f"what is {i}"), ("assistant", f"it is the number {i}")] for i in range(30)]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    (tmp_path / "chat.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    sizes = "--lr 1e-3 --steps 6 --batch-tokens 128 --max-length 128 --warmup-steps 1 --eval-every 0 --save-every 1"
    paths = ("--target", "llama", "--data", tmp_path / "chat.jsonl", "--output", tmp_path / "new")
    return ("train", *paths, *(part for option in OWN.items() for part in option), *sizes.split())


def without(command: tuple[object, ...], *options: str) -> tuple[object, ...]:
    """The command without these options and their values."""
    pairs = zip(("", *command), command, strict=False)
    return tuple(part for before, part in pairs if part not in options and before not in options)


def instead(command: tuple[object, ...], folder: Path) -> tuple[object, ...]:
    """The command with another output."""
    return (*without(command, "--output"), "--output", folder)


def test_a_head_is_trained_and_used(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    result = run(*command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"{tmp_path / 'chat.jsonl'}:6: not JSON" in result.stderr
    assert "1 of 31 lines cannot be used" in result.stderr
    assert f"{tmp_path / 'new'} holds the head of step" in result.stderr.splitlines()[-1]
    assert "0-alpha" in result.stderr
    assert "eyas: step 6/6 loss " in result.stderr
    record = json.loads((tmp_path / "new" / "training.json").read_text())
    assert (record["method"], record["steps"], record["config"]["lr"]) == ("eagle3", 6, 1e-3)
    assert {"0-alpha", "chain tau", "tau"} <= set(record["heldout"])
    assert record["data"]["files"] == ["chat.jsonl"]
    assert len(record["data"]["sha256"]) == 64
    given = shlex.split("generate --target llama hello --max-new-tokens 8 --tree fixed --json --draft")
    used = run(*given, tmp_path / "new")
    assert used.exit_code == 0
    assert used.stderr == ""
    assert json.loads(used.stdout)["method"] == "eagle3"
    card = (tmp_path / "new" / "README.md").read_text()
    assert "`ttt.steps` 2" in card
    assert f"| longest sequence | {record['trained_length']} |" in card


@pytest.mark.exhaustive
def test_the_draft_vocabulary_is_what_the_data_asks_for(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    """The most frequent tokens that count, of the training examples; another head's stays when training begins with it;
    and it belongs to the state, so that a resumed run finds the very same."""
    assert run(*command, "--head.draft-vocab", 8, "--steps", 2).exit_code == 0
    weights = checkpoints.load(tmp_path / "new")
    drafted = set(weights.tensors["draft_ids"].tolist())
    letter = {character: 7 + ord(character) - 32 for character in " theinumbr"}  # of the tokenizer in conftest.py
    assert len(drafted) == weights.config["draft_vocab_size"] == 8
    assert {letter[c] for c in " tei"} | {2} <= drafted <= set(letter.values()) | {2, *range(7 + 16, 7 + 26)}
    card = (tmp_path / "new" / "README.md").read_text()
    assert f"| tokens that it can draft | 8 of {weights.config['vocab_size']} |" in card
    other = instead(without(command, "--head.layers"), tmp_path / "more")
    assert run(*other, "--init", tmp_path / "new", "--steps", 2).exit_code == 0
    assert set(checkpoints.load(tmp_path / "more").tensors["draft_ids"].tolist()) == drafted
    refused = run(*other, "--steps", 2, "--head.layers", "0,2,3")
    assert refused.exit_code == 2
    assert "draft vocabulary or embeddings of the head" in refused.stderr


@pytest.mark.exhaustive
def test_a_window_is_not_handed_on(run: Run, command: tuple[object, ...], tmp_path: Path) -> None:
    """A head that was trained with a sliding window sees whole examples here: published with its window, it would be
    served otherwise than it was trained. And no flag of a window passes that would do nothing."""
    assert run(*command, "--steps", 2).exit_code == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    windowed = json.dumps({**config, "use_sliding_window": True, "sliding_window": 8})
    (tmp_path / "new" / "config.json").write_text(windowed)
    assert checkpoints.load(tmp_path / "new").config["window"] == 8
    other = instead(without(command, "--head.layers"), tmp_path / "more")
    trained = run(*other, "--init", tmp_path / "new", "--steps", 2)
    assert trained.exit_code == 0, trained.output
    assert "was trained with a window of 8; here it sees whole examples" in trained.stderr
    assert checkpoints.load(tmp_path / "more").config["window"] is None
    refused = run(*other, "--init", tmp_path / "new", "--window.sink", 1)
    assert refused.exit_code == 2
    said = "window.sink: this head was trained with a window of 8, without sinks; give --window.size too"
    assert said in refused.stderr


@pytest.mark.parametrize(("every", "said"), [
    (2, "eyas: interrupted: step 2 of 6 is saved in {}; the same command goes on from there"),
    (0, "eyas: interrupted: no step is saved; the same command begins again"),
])  # fmt: skip
def test_a_step_that_ctrl_c_has_cut_off_is_not_told(
    every: int, said: str, run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a second Ctrl-C within an update of the weights, which is not saved, was told as the step that is."""
    update, calls = torch.optim.AdamW.step, []

    def step(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return update(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    result = run(*without(command, "--save-every"), "--save-every", every)
    assert result.exit_code == 130, (result.output, result.exception)
    assert result.stderr.splitlines()[-1] == said.format(tmp_path / "new")


BAD = {
    "a method that cannot": (("--method", "vanilla"), "the method 'vanilla' has nothing to train; these have: dflash"),
    "a target with few layers": (("--head.layers", "auto"), "this target has 4: pass layers with --head.layers"),
    "a head that is as it is": (("--init", "head"), "--init names a finished head: leave --head.layers out"),
    "a tracker that is not there": (("--log", "wandb"), "wandb is not installed: pip install wandb, or leave it out"),
    "an unknown tracker": (("--log", "tensorbord"), "log knows tensorboard and wandb"),
    "nothing to recompute": (("--method", "eagle1", "--checkpointing"), "checkpointing: the method eagle1 keeps too"),
    "an impossible rate": (("--lr", -1), "lr must be 0 or more; got -1.0"),
    "an unknown schedule": (("--schedule", "linaer"), "--schedule"),
    "two lengths": (("--epochs", 2), "steps and epochs each say how long"),
    "broken betas": (("--betas", "0.9;0.95"), "not a list of numbers"),
    "no data": (("--data", "./nowhere.jsonl"), "./nowhere.jsonl does not exist"),
    "an output that is a file": (("--output", "chat.jsonl"), "cannot write"),
    "no head to begin with": (("--method", "eagle1", "--init", "./nowhere"), "./nowhere: there is no such folder"),
    "an option of another method": (("--method", "eagle1", "--tree.nodes", 4), "unknown option 'tree.nodes'"),
    "no tokenizer": (("--target", "bare"), "no tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(run: Run, command: tuple[object, ...], name: str, tmp_path: Path) -> None:
    arguments, words = BAD[name]
    given = [tmp_path / a if a == "chat.jsonl" else a for a in arguments]
    result = run(*(without(command, *OWN) if "--method" in arguments else command), *given)
    assert result.exit_code == 2, (result.output, result.exception)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("eyas: error: ")
    assert words in last


def test_a_busy_output_is_refused_before_the_target_is_read(
    run: Run, command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second training read the target and the data, for minutes, before it was refused."""
    monkeypatch.setattr("eyas_train.commands.train.load_target", lambda *_: pytest.fail("the target was read"))
    folder = Path(str(command[command.index("--output") + 1]))
    folder.mkdir(exist_ok=True)
    with locked_output(folder):
        result = run(*command)
    assert result.exit_code == 2, result.output
    assert f"{folder} is being written by process {os.getpid()} on " in result.stderr
