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
    path = written(folder / f"data{suffix}", records)
    if not place:
        return str(path)
    remote.pipe_file(f"/bucket/data{suffix}", path.read_bytes())
    return f"memory://bucket/data{suffix}"


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
def test_generate_reads_it(kind: str, run: Run, tmp_path: Path, remote: MemoryFileSystem) -> None:
    """Guards that a file in Parquet or at a URL gets the same answers and ids as one in JSONL."""
    answers = []
    for number, way in enumerate((".jsonl", kind)):
        source, output = placed(way, ASKED, tmp_path, remote), tmp_path / f"{number}.jsonl"
        result = run("generate", "--target", "llama", "--input", source, "--output", output, "--max-new-tokens", 6)
        assert result.exit_code == 0, result.output
        answers.append([(line["id"], line["token_ids"]) for line in map(json.loads, output.read_text().splitlines())])
    assert answers[0] == answers[1]
    assert [name for name, _ in answers[0]] == ["q0", "q1", "q2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".parquet", "memory .jsonl"])
def test_heads_learn_from_it(kind: str, run: Run, tmp_path: Path, remote: MemoryFileSystem) -> None:
    """Guards that regenerated chats, features and a datastore do not depend on the form of the file."""
    made = []
    for way in (".jsonl", kind):
        source, place = placed(way, CHATS[:12], tmp_path, remote), tmp_path / f"of {way}"
        place.mkdir()
        data = ("--target", "llama", "--data", source, "--output")
        own = run("regenerate", *data, place / "own.jsonl", "--max-new-tokens", 4, "--limit", 3)
        features = run("features", *data, place / "features", "--layers", "1", "--max-length", 64, "--heldout", 0)
        store = run("datastore", "build", *data, place / "datastore")
        assert [result.exit_code for result in (own, features, store)] == [0, 0, 0], (own.output, features.output)
        replies = [json.loads(line)["messages"] for line in (place / "own.jsonl").read_text().splitlines()]
        kept = FeatureStore(place / "features")
        tokens = np.load(place / "datastore/tokens.npy").tolist()
        made.append((replies, kept.data().train[3], kept.features(3, [1]).tolist(), tokens))
        assert kept.settings.data["files"][0]["name"] == Path(source).name
    assert made[0] == made[1]


def test_what_is_wrong_is_one_line(
    run: Run, tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against tracebacks of fsspec, of a store's package and of pyarrow."""
    for command in (("generate", "--input"), ("regenerate", "--data"), ("datastore", "build", "--data")):
        gone = run(*command, "memory://bucket/gone.jsonl", "--output", tmp_path / "out")
        assert (gone.exit_code, gone.stderr.count("\n")) == (2, 1), gone.output
        assert "memory://bucket/gone.jsonl does not exist" in gone.stderr
    unknown = run("generate", "--input", "nowhere://x.jsonl")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert "nowhere://x.jsonl cannot be read: " in unknown.stderr

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(OptionError, match=r"^s3://b/x.jsonl cannot be read: Install s3fs .*; pip install s3fs$"):
        opened(RemoteFile("s3://b/x.jsonl"))


def test_features_at_a_url_that_does_not_work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and exit status 2, before anything is trained: for a wrong URL, and for one whose package is missing."""
    command = ("train", "--target", "llama", "--output", tmp_path / "head", "--features")
    for url, said in (
        ("memory://bucket/nothing", "memory://bucket/nothing/manifest.json does not exist; check the path"),
        ("nowhere://bucket/features", "nowhere://bucket/features/manifest.json cannot be read: Protocol not known"),
    ):
        result = run(*command, url)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert said in result.stderr

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "open", missing)
    assert "pip install s3fs" in run(*command, "s3://bucket/features").stderr
    assert not (tmp_path / "head").exists()


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


def test_names_of_urls() -> None:
    """Guards against names with the query or the bucket in them: the name says what a file holds."""
    for url in ("s3://b/data/chats.jsonl", "simplecache::s3://b/chats.jsonl", "https://h/chats.jsonl?version=2"):
        assert as_file(url).name == "chats.jsonl"
    assert as_file("memory://chats.jsonl").name == "chats.jsonl"
