"""A stand-in for the hub on the loopback: repositories are folders here. For the hub's own client, with HF_ENDPOINT.

It answers what `snapshot_download`, `hf_hub_download` and `has_file` ask for; there is one revision of everything.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "local_hub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def local_hub(repositories: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Yields its address, and a list that grows with every path that is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *args: Any) -> None:
            pass

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            status, kind, content = _content(repositories, path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if path.lstrip("/").count("/") > 3 else "RepoNotFound")
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _content(repositories: Mapping[str, Path], path: str) -> tuple[int, str, bytes]:
    """(status, type, body) for a path."""
    parts = path.strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if api else parts[:2])
    folder = repositories.get(name)
    if folder is None:
        return 404, "application/json", b"{}"
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    if api and "tree" in parts:
        listed = [{"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": COMMIT} for file in files]
        return 200, "application/json", json.dumps(listed).encode()
    if api:
        siblings = [{"rfilename": file} for file in files]
        return (
            200,
            "application/json",
            json.dumps({"id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}).encode(),
        )
    file = folder / "/".join(parts[4:])  # owner/name/resolve/revision/...
    if not file.is_file():
        return 404, "text/plain", b""
    return 200, "application/octet-stream", file.read_bytes()
