"""A stand-in for the hub on the loopback: repositories are folders here. For the hub's own client, with HF_ENDPOINT.

It answers what `snapshot_download`, `hf_hub_download`, `has_file`, `create_repo` and
`upload_folder` ask for; there is one revision of everything. Files come inside the commit
("regular" for each of them), so nothing of large-file storage is needed.
"""

import base64
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
def local_hub(repositories: Mapping[str, Path], new: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yields its address, and a list that grows with every path that is asked for.

    Args:
        new: the folder for repositories that are made, as OWNER/NAME.
    """
    held = dict(repositories)
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
            self._reply(path, *_content(held, path), body)

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = _written(held, new, path, given)
            url = f"http://127.0.0.1:{self.server.server_address[1]}/"
            status = 404 if answer is None else 200
            self._reply(path, status, "application/json", json.dumps(answer or {}).replace("HUB/", url).encode(), True)

        def _reply(self, path: str, status: int, kind: str, content: bytes, body: bool) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound" if path.startswith("/api/") else "EntryNotFound")
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
        listed = [
            {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": COMMIT} for file in files
        ]
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


def _written(held: dict[str, Path], new: Path | None, path: str, given: bytes) -> dict[str, Any] | None:
    """The answer to a request that writes; None for one that is not known. HUB/ stands for the stand-in's address."""
    parts = path.strip("/").split("/")
    if parts == ["api", "repos", "create"] and new is not None:
        asked = json.loads(given)
        name = f"{asked['organization']}/{asked['name']}"
        held[name] = new / name
        held[name].mkdir(parents=True, exist_ok=True)
        (new / f"{asked['name']}.asked.json").write_bytes(given)
        return {"url": f"HUB/{name}"}
    if parts[:2] == ["api", "validate-yaml"]:
        return {"errors": [], "warnings": []}
    name = "/".join(parts[2:4])
    if name in held and "preupload" in parts:
        paths = [one["path"] for one in json.loads(given)["files"]]
        return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
    if name in held and "commit" in parts:
        for line in map(json.loads, given.splitlines()):
            if line["key"] == "file":
                file = held[name] / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        return {"commitUrl": f"HUB/{name}/commit/{COMMIT}", "commitOid": COMMIT}
    return None
