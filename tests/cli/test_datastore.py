"""`eyas datastore`, and `--method rest` with what it makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.cli import datastore as datastore_command
from eyas.datastore import Manifest, _build

Run = Callable[..., Any]


@pytest.fixture
def novel(tmp_path: Path) -> Path:
    (tmp_path / "novel.txt").write_text(
        "It was a dark night.<|endoftext|>It was a bright morning, and the birds were singing."
    )
    return tmp_path / "novel.txt"


@pytest.mark.slow
def test_the_way_of_a_user(run: Run, answer: Run, chats: Path, novel: Path, tmp_path: Path) -> None:
    """Build, append, merge, verify, generate; the text is that of plain decoding."""
    build = ("datastore", "build", "--target", "llama", "--output", tmp_path / "store")
    first = run(*build, "--data", chats)
    assert first.exit_code == 0, (first.output, first.exception)
    assert f"{chats}:6: not JSON" in first.stderr
    assert f"{chats}: 1 of 41 lines cannot be used" in first.stderr
    assert "1 source, 1 segment, " in first.stderr.splitlines()[-1]
    assert "2 sources, 2 segments" in run(*build, "--data", novel, "--append").stderr
    merged = run(*build, "--merge")
    assert "2 sources, 1 segment, " in merged.stderr
    assert "reading" not in merged.stderr
    assert run("datastore", "verify", tmp_path / "store").stderr.strip().endswith("every checksum is right")
    prompt, own = ("It was a dark ",), ("--method", "rest", "--datastore", tmp_path / "store", "--rest.nodes", 9)
    rest = answer(*prompt, *own)
    assert rest["tree"] == {"kind": "trie", "nodes": 9, "depth": 10, "datastore": str(tmp_path / "store")}
    assert rest["token_ids"] == answer(*prompt, "--method", "vanilla")["token_ids"]
    words = Manifest.read(tmp_path / "store")
    assert (words.vocab_size, [source.name for source in words.sources]) == (160, ["chat.jsonl", "novel.txt"])
    assert words.sources[1].documents == 2


def test_whole_chats_stand_in_it(run: Run, chats: Path, tmp_path: Path, world: Path) -> None:
    """Guards against chats of which only the assistant's tokens are there, or that are parted into
    training and held-out ones."""
    from transformers import AutoTokenizer

    from eyas.datastore import Datastore

    run("datastore", "build", "--target", "llama", "--output", tmp_path / "store", "--data", chats)
    words, store = AutoTokenizer.from_pretrained(world / "llama"), Datastore.open(tmp_path / "store")
    for i in range(40):
        ids = words(f"<u>what is {i}<a>it is", add_special_tokens=False)["input_ids"]
        found = store.look_up(ids, len(ids), len(ids), 1, 9)
        assert found is not None
        assert found.count == 1


def test_ctrl_c_keeps_what_was_read(
    run: Run, chats: Path, novel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards an interrupt while sorting: status 130, one line, and the same command does not read again."""
    command = (
        "datastore",
        "build",
        "--target",
        "llama",
        "--output",
        tmp_path / "store",
        "--data",
        chats,
        "--data",
        novel,
    )

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_build, "order_of", stop)
        result = run(*command)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == (
        f"eyas: interrupted: what was read is kept in {tmp_path / 'store'}; the same command goes on"
    )
    again = run(*command)
    assert again.exit_code == 0
    assert "reading" not in again.stderr


@pytest.mark.slow
def test_refusals(refused: Callable[..., str], run: Run, novel: Path, tmp_path: Path, world: Path) -> None:
    """One line and status 2 for everything that a user may get wrong."""
    build = ("datastore", "build", "--target", "llama", "--output", tmp_path / "store")
    assert "option --data is missing" in refused(*build)
    assert "does not exist; check the path" in refused(*build, "--data", tmp_path / "none.txt")
    assert "holds no datastore to append to or to merge" in refused(*build, "--merge")
    assert "tokenizer" in refused(
        "datastore", "build", "--tokenizer", tmp_path, "--output", tmp_path / "s", "--data", novel
    )
    assert "make one with `eyas datastore build`" in refused("datastore", "verify", tmp_path / "store")
    assert "make one with `eyas datastore build" in refused("generate", "--target", "llama", "--method", "rest", "x")
    assert run(*build, "--data", novel).exit_code == 0
    (tmp_path / "other.txt").write_text("Something else.")
    assert "holds other data (novel.txt): append to it" in refused(*build, "--data", tmp_path / "other.txt")
    shutil.copytree(world / "llama", tmp_path / "retrained")
    words = json.loads((tmp_path / "retrained" / "tokenizer.json").read_text())
    words["model"]["vocab"] = {("z2" if word == "z" else word): i for word, i in words["model"]["vocab"].items()}
    (tmp_path / "retrained" / "tokenizer.json").write_text(json.dumps(words))
    other = ("--target", tmp_path / "retrained", "--data", tmp_path / "other.txt", "--append")
    assert "another tokenizer" in refused("datastore", "build", "--output", tmp_path / "store", *other)
    path = Manifest.read(tmp_path / "store").segments[0].paths(tmp_path / "store")[0]
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert "its checksum is another" in refused("datastore", "verify", tmp_path / "store")


def test_help_shows_the_commands(run: Run) -> None:
    """Guards the group: both commands and their flags are found."""
    assert {"build", "verify"} == set(datastore_command.COMMANDS)
    shown = run("datastore", "build", "--help").output
    for flag in ("--data", "--output", "--append", "--merge", "--segment-tokens", "--target", "--tokenizer"):
        assert flag in shown
