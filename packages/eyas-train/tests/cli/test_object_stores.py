"""Data and features in an object store: a server of S3's protocol on this machine, asked by s3fs, and by plain HTTP.

`make scale` installs moto and s3fs; other test runs skip this."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file

pytest.importorskip("s3fs", reason="s3fs is installed by `make scale`")
servers = pytest.importorskip("moto.server", reason="moto is installed by `make scale`")

Run = Callable[..., Any]
TALKS = [(("user", f"What is {i}?"), ("assistant", f"It is {i}. " * 3)) for i in range(12)]
CHATS = [
    {"id": f"q{i}", "messages": [{"role": role, "content": text} for role, text in talk]}
    for i, talk in enumerate(TALKS)
]
LEARN = ("--method", "eagle1", "--steps", 3, "--batch-tokens", 128, "--eval-every", 0, "--heldout", 0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store with the bucket `bucket`, where s3fs finds it."""
    running = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    running.url = f"http://{host}:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": running.url, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).makedirs("bucket", exist_ok=True)
    yield running
    running.stop()


def sent(folder: Path, protocol: str, server: Any) -> str:
    """Copy a folder's files to the store; return its URL there."""
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for path in folder.iterdir():
        files.pipe_file(f"bucket/{folder.name}/{path.name}", path.read_bytes(), ACL="public-read")
    return f"s3://bucket/{folder.name}" if protocol == "s3" else f"{server.url}/bucket/{folder.name}"


@pytest.mark.parametrize("protocol", ["s3", "http"])
def test_answers_and_heads(protocol: str, run: Run, tmp_path: Path, server: Any) -> None:
    """Guards that what is read from a real server gives the answers and the head of what is read here."""
    data, stored, made = tmp_path / "data", tmp_path / "features", []
    data.mkdir()
    (data / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    kept = ("features", "--target", "llama", "--data", data / "chats.jsonl", "--output", stored)
    assert run(*kept, "--method", "eagle1", "--max-length", 64, "--heldout", 0).exit_code == 0
    for chats, features in ((data, stored), (sent(data, protocol, server), sent(stored, protocol, server))):
        out = tmp_path / f"made {len(made)}"
        asked = ("--data", f"{chats}/chats.jsonl", "--output", out / "own.jsonl", "--max-new-tokens", 4, "--limit", 3)
        out.mkdir()
        for command in (("regenerate", *asked), ("train", "--features", features, "--output", out / "head", *LEARN)):
            result = run(*command, "--target", "llama")
            assert result.exit_code == 0, result.output
        replies = [json.loads(line)["messages"] for line in (out / "own.jsonl").read_text().splitlines()]
        made.append((replies, {name: x.tolist() for name, x in load_file(out / "head" / "model.safetensors").items()}))
    assert made[0] == made[1]


@pytest.mark.parametrize("gone", [False, True])
def test_a_server_that_refuses(gone: bool, run: Run, tmp_path: Path, server: Any) -> None:
    """Guards against "does not exist" where a server refuses or nothing listens: one line with what happened, exit
    status 2, and nothing is written."""
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file("bucket/private/manifest.json", b"{}")
    if gone:
        server.stop()
    url = f"{server.url}/bucket/private"
    result = run("train", "--target", "llama", "--features", url, "--output", tmp_path / "head", *LEARN)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"{url}/manifest.json cannot be found: " in result.stderr
    assert ("Cannot connect to host" if gone else "403") in result.stderr
    assert not (tmp_path / "head").exists()
