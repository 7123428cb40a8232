"""A stand-in for the hub on 127.0.0.1: repositories that are made, filled by a commit, listed and read, as huggingface_hub asks for it.

Files come inside the commit (the answer to `preupload` says "regular" for all of them), so nothing of large-file storage is needed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What the stand-in holds, and what it was asked."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # repository -> path -> content
    private: dict[str, bool] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """The stand-in, which answers until the block ends."""
    hub = FakeHub()

    class Handler(_Handler):
        held = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    held: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self._parts()
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            status = 409 if repo in self.held.files else 200
            self.held.files.setdefault(repo, {})
            self.held.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._json({"url": f"{self.held.url}/{repo}"}, status)
        elif parts[:2] == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif "preupload" in parts:
            paths = [one["path"] for one in json.loads(body)["files"]]
            self._json({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif "commit" in parts:
            repo = "/".join(parts[2:4])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.held.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json({"commitUrl": f"{self.held.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._json({"error": "not found"}, 404)

    def do_GET(self, head: bool = False) -> None:
        parts = self._parts()
        if parts[:2] == ["api", "models"]:
            files = self.held.files.get("/".join(parts[2:4]))
            if files is None:
                self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            elif "tree" in parts:
                self._json([{"type": "file", "path": path, "size": len(held), "oid": _oid(held)} for path, held in files.items()])
            else:
                listed = [{"rfilename": path, "size": len(held), "blobId": _oid(held)} for path, held in files.items()]
                self._json({"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": listed, "private": False, "tags": []})
        elif len(parts) > 4 and parts[2] == "resolve":
            content = self.held.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if content is None:
                self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            else:
                self._send(content, 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}, head)
        else:
            self._json({"error": "not found"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def _parts(self) -> list[str]:
        self.held.asked.append(f"{self.command} {self.path}")
        return self.path.partition("?")[0].strip("/").split("/")

    def _json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(answer).encode(), status, {"Content-Type": "application/json", **(headers or {})}, self.command == "HEAD")

    def _send(self, content: bytes, status: int, headers: dict[str, str], head: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
