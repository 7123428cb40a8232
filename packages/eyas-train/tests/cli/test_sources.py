"""Data in Parquet, and data at a URL: the same answers as from a JSONL file here, by every command that reads data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from eyas.errors import InputError, OptionError
from eyas.text.sources import RemoteFile, as_file, opened
from eyas_lab.chat_files import chat_lines
from eyas_train.store import FeatureStore

Run = Callable[..., Any]
ASKED = [{"id": f"q{i}", "prompt": f"Tell me {what}."} for i, what in enumerate(("a story", "a joke", "the time"))]
CALL = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
TALKS = [(("user", f"What is {i}?"), ("assistant", f"It is {i}. " * 3)) for i in range(12)]
CHATS: list[dict[str, Any]] = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
CHATS += [{"messages": [{"role": "user", "content": "Time?"}, {"role": "assistant", "tool_calls": [CALL]}]}]


@pytest.fixture
def remote() -> Iterator[MemoryFileSystem]:
    """A store in memory, at memory://."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records as JSONL, or as a table; skips where pyarrow is not installed (`make scale` has it)."""
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is installed by `make scale`")
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    else:
        path.write_bytes(gzip.compress(as_lines(records)) if path.suffix == ".gz" else as_lines(records))
    return path


def placed(kind: str, records: list[dict[str, Any]], folder: Path, remote: MemoryFileSystem) -> str:
    """Return where records are, of a kind like ".parquet" or "memory .jsonl"."""
    place, _, suffix = kind.rpartition(" ")
    path = written(folder / f"{folder.name}{suffix}", records)
    if not place:
        return str(path)
    remote.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    return f"memory://bucket/{path.name}"


KINDS = (".parquet", "memory .jsonl", "memory .jsonl.gz", "memory .parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_records(kind: str, tmp_path: Path, remote: MemoryFileSystem) -> None:
    """Guards against keys that a table adds to messages (its nulls), and against rows that are lost between groups."""
    source = as_file(placed(kind, CHATS, tmp_path, remote))
    lines = list(chat_lines(source))
    assert [json.loads(raw) for _, raw in lines] == CHATS
    assert lines[2][0] == f"{source}{', row ' if 'parquet' in kind else ':'}3"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".jsonl.gz", *KINDS])
def test_every_command_reads_it(kind: str, run: Run, tmp_path: Path, remote: MemoryFileSystem) -> None:
    """Guards that answers, regenerated chats, features and a datastore do not depend on the form of the file."""
    made = []
    for way in (".jsonl", kind):
        place = tmp_path / f"of {way}"
        for name in ("asked", "chats"):
            (place / name).mkdir(parents=True)
        asked = placed(way, ASKED, place / "asked", remote)
        commands = [("generate", "--input", asked, "--output", place / "answers.jsonl", "--max-new-tokens", 6)]
        chats = placed(way, CHATS[:12], place / "chats", remote)
        data = ("--data", chats, "--output")
        if kind in (".parquet", "memory .jsonl"):
            commands += [
                ("regenerate", *data, place / "own.jsonl", "--max-new-tokens", 4, "--limit", 3),
                ("features", *data, place / "features", "--layers", "1", "--max-length", 64, "--heldout", 0),
                ("datastore", "build", *data, place / "datastore"),
            ]
        for command in commands:
            result = run(*command, "--target", "llama")
            assert result.exit_code == 0, result.output
        lines = map(json.loads, (place / "answers.jsonl").read_text().splitlines())
        found = [[(line["id"], line["token_ids"]) for line in lines]]
        assert [name for name, _ in found[0]] == ["q0", "q1", "q2"]
        if len(commands) > 1:
            kept = FeatureStore(place / "features")
            assert kept.settings.data["files"][0]["name"] == Path(chats).name
            found.append([json.loads(line)["messages"] for line in (place / "own.jsonl").read_text().splitlines()])
            found += [
                kept.data().train[3],
                kept.features(3, [1]).tolist(),
                np.load(place / "datastore/tokens.npy").tolist(),
            ]
        made.append(found)
    assert made[0] == made[1]


def test_what_is_wrong_is_one_line(
    run: Run, tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tracebacks of fsspec, of a store's package and of pyarrow, and a training that begins before."""

    def said(*command: object) -> str:
        result = run(*command)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), (command, result.output)
        return str(result.stderr)

    train = ("train", "--target", "llama", "--output", tmp_path / "head", "--features")
    for command in (("generate", "--input"), ("regenerate", "--data"), ("datastore", "build", "--data")):
        gone = said(*command, "memory://bucket/gone.jsonl", "--output", tmp_path / "out")
        assert "memory://bucket/gone.jsonl does not exist" in gone
    assert "memory://bucket/nothing/manifest.json does not exist; check" in said(*train, "memory://bucket/nothing")
    assert "nowhere://x.jsonl cannot be read: " in said("generate", "--input", "nowhere://x.jsonl")
    assert "nowhere://b/manifest.json cannot be read: Protocol not known" in said(*train, "nowhere://b")

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(OptionError, match=r"^s3://b/x.jsonl cannot be read: Install s3fs .*; pip install s3fs$"):
        opened(RemoteFile("s3://b/x.jsonl"))
    assert "pip install s3fs" in said(*train, "s3://bucket/features")
    assert not (tmp_path / "head").exists()
    for url in ("simplecache::s3://b/chats.jsonl", "https://h/chats.jsonl?version=2", "memory://chats.jsonl"):
        assert as_file(url).name == "chats.jsonl"


def test_parquet_without_its_package(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the command that installs it, and exit status 2; also for a file that is damaged."""
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and so on")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "pyarrow", None)
        result = run("generate", "--input", tmp_path / "data.parquet")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "need pyarrow: pip install '.[parquet]'" in result.stderr
    pytest.importorskip("pyarrow", reason="pyarrow is installed by `make scale`")
    with pytest.raises(InputError, match="is damaged or incomplete, not a file in Parquet"):
        list(chat_lines(as_file(tmp_path / "data.parquet")))
