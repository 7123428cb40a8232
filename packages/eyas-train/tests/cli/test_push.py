"""`eyas push`, and heads by their hub id, with a stand-in for the hub on 127.0.0.1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from eyas import checkpoints
from eyas.checkpoints import load
from golden import same
from hub import COMMIT, local_hub

Run = Callable[..., Any]
RECORD = {
    "method": "eagle1",
    "target": {"name": "someone/llama", "fingerprint": "abc:0.1"},
    "data": {"report": "40 examples", "sha256": "f00"},
    "head": {"vocab_size": 160, "draft_vocab_size": 100},
    "trained_length": 64,
    "examples": {"train": 38, "heldout": 2},
    "best_step": 1200,
    "tokens": 34567,
    "heldout": {"tau": 2.5, "0-alpha": 0.75},
    "versions": {"eyas": "0.1.0"},
}


@dataclass(frozen=True)
class Hub:
    """The stand-in, as the only hub that the client knows."""

    url: str
    asked: list[str]  # paths
    folder: Path  # of its repositories


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    with local_hub({}, tmp_path / "hub") as (url, asked):
        monkeypatch.setattr(constants, "ENDPOINT", url)  # HF_ENDPOINT, which the client reads when it is imported
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "a-token-of-the-test")
        huggingface_hub.close_session()
        yield Hub(url, asked, tmp_path / "hub")
    huggingface_hub.close_session()


@pytest.fixture
def head(world: Path, tmp_path: Path) -> Path:
    """A head with the record of a training, and with files that are nobody else's business."""
    folder = tmp_path / "trained"
    checkpoints.save(load(world / "head"), folder)
    (folder / "training.json").write_text(json.dumps(RECORD))
    (folder / "state-3-3").mkdir()
    (folder / "state-3-3" / "shard-00001-model-00001-of-00001.safetensors").write_text("resume from here")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_nothing_is_sent_without_yes(run: Run, hub: Hub, head: Path) -> None:
    """Bugs: files that are sent before anybody has seen which; a private file among them; a card
    without figures or without a use."""
    result = run("push", head, "me/head", "--license", "mit")
    assert result.exit_code == 0, (result.output, result.exception)
    assert hub.asked == []
    assert "nothing was sent; with --yes these 6 files go to me/head" in result.stderr
    for part in (
        'license: "mit"', 'base_model: "someone/llama"', "| tau | 2.5000 |", "| 0-alpha | 0.7500 |", "| data | 40 examples |",
        "| steps | 1,200 |", "100 of 160", "eyas generate --target someone/llama --draft me/head", 'custom_generate="me/head"',
        "eyas export me/head --format vllm", "vllm serve someone/llama", "--speculative-algorithm EAGLE ",
    ):  # fmt: skip
        assert part in result.stdout, part
    assert "shard-00001" not in result.stdout
    assert "notes.txt" not in result.stdout


@pytest.mark.slow
def test_there_and_back(run: Run, hub: Hub, head: Path, answer: Callable[..., dict[str, Any]]) -> None:
    """Bugs: a file that is missing there; a head that a hub id does not load; a repository that is
    public against the user's will."""
    result = run("push", head, "me/head", "--yes", "--private", "--json")
    assert result.exit_code == 0, (result.output, result.exception, hub.asked)
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert (told["sent"], told["url"]) == (True, f"{hub.url}/me/head/commit/{COMMIT}")
    by_us = {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    there = hub.folder / "me" / "head"
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == by_us | {"config.json", "model.safetensors", "training.json"} == set(told["files"])
    assert (there / "README.md").read_text() == told["card"]
    asked = json.loads((hub.folder / "head.asked.json").read_text())
    assert asked.get("visibility") == "private" or asked.get("private"), asked
    assert (head / "notes.txt").exists()
    assert not (head / "custom_generate").exists(), "the user's folder changed"
    again = load("me/head")
    assert again.source == f"me/head@{COMMIT}"
    assert same(again.tensors, load(head).tensors)
    one, other = (answer("--draft", draft, "--tree.nodes", 9, "--prompt-ids", "5,9,100") for draft in ("me/head", head))
    assert (one["token_ids"], one["accepted_lengths"]) == (other["token_ids"], other["accepted_lengths"])
    assert run("push", head, "me/head", "--yes").exit_code == 0, "a second time into the same repository"


def test_refused(refused: Callable[..., str], hub: Hub, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: a page of traceback where the hub says no; something that is no hub id becomes a
    repository of that name."""
    assert "is not a hub id: give OWNER/NAME" in refused("push", head, "head")
    assert "folder nowhere does not exist" in refused("push", "nowhere", "me/head")
    assert "no such repository" in refused("generate", "--target", "llama", "--draft", "me/nothing", "hi")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the hub did not take me/head" in refused("push", head, "me/head", "--yes", "--json")
