"""`eyas datastore`, and `--method rest` with what it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eyas_lab import datastore
from eyas_lab.datastore import Datastore, Manifest

Run = Callable[..., Any]


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    (tmp_path / "novel.txt").write_text("It was a dark night.<|endoftext|>It was a bright morning, and the birds sang.")
    return tmp_path / "novel.txt"


@pytest.mark.slow
def test_the_way_of_a_user(run: Run, answer: Run, chats: Path, novel: Path, tmp_path: Path, world: Path) -> None:
    """Build, generate; the text is that of plain decoding."""
    place = ("--output", tmp_path / "store", "--data", chats, "--data", novel)
    build = ("datastore", "build", "--target", "llama", *place)
    first = run(*build)
    assert first.exit_code == 0, (first.output, first.exception)
    assert f"{chats}:6: not JSON" in first.stderr
    assert f"{chats}: 1 of 41 lines cannot be used" in first.stderr
    assert first.stderr.splitlines()[-1].endswith("tokens of 2 sources")
    assert "reading" not in run(*build).stderr
    prompt, own = ("It was a dark ",), ("--method", "rest", "--datastore", tmp_path / "store", "--rest.nodes", 9)
    rest = answer(*prompt, *own)
    assert rest["tree"] == {"kind": "trie", "nodes": 9, "depth": 10, "datastore": str(tmp_path / "store")}
    assert rest["token_ids"] == answer(*prompt, "--method", "vanilla")["token_ids"]
    made = Manifest.read(tmp_path / "store")
    assert [source["name"] for source in made.sources] == ["chat.jsonl", "novel.txt"]
    assert made.sources[1]["documents"] == 2
    words, store = AutoTokenizer.from_pretrained(world / "llama"), Datastore.open(tmp_path / "store")
    for i in range(40):  # whole chats, held-out ones too
        ids = words(f"<u>what is {i}<a>it is", add_special_tokens=False)["input_ids"]
        found = store.look_up(ids, len(ids), len(ids), 1, 9)
        assert found is not None
        assert found.count == 1


def test_ctrl_c_leaves_nothing(run: Run, novel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an interrupt while sorting: status 130, one line, no folder."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(datastore, "order_of", stop)
    result = run("datastore", "build", "--target", "llama", "--output", tmp_path / "store", "--data", novel)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "eyas: interrupted: nothing was written"
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_refusals(refused: Callable[..., str], run: Run, novel: Path, tmp_path: Path) -> None:
    """One line and status 2 for everything that a user may get wrong."""
    build = ("datastore", "build", "--target", "llama", "--output", tmp_path / "store")
    assert "option --data is missing" in refused(*build)
    assert "does not exist; check the path" in refused(*build, "--data", tmp_path / "none.txt")
    own = ("--tokenizer", tmp_path, "--output", tmp_path / "s", "--data", novel)
    assert "tokenizer" in refused("datastore", "build", *own)
    assert "make one with `eyas datastore build" in refused("generate", "--target", "llama", "--method", "rest", "x")
    assert run(*build, "--data", novel).exit_code == 0
    (tmp_path / "other.txt").write_text("Something else.")
    assert "holds a datastore of novel.txt" in refused(*build, "--data", tmp_path / "other.txt")
