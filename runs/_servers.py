"""Servers as child processes."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eyas.errors import InputError

READY_SECONDS, END_SECONDS = 600, 20
Process = subprocess.Popen[bytes]


@contextmanager
def served(command: Sequence[object], log: Path, end_seconds: float = END_SECONDS) -> Iterator[tuple[str, Process]]:
    """A server of this command, ready: its base URL and its process. It has ended when the block has.

    Args:
        command: {port} is filled in.
        end_seconds: after SIGTERM; then it is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts, url = [str(part).replace("{port}", str(port)) for part in command], f"http://127.0.0.1:{port}"
    with log.open("w") as output, subprocess.Popen(parts, stdout=output, stderr=output) as process:
        try:
            _wait_for(url, process, shlex.join(parts), log)
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(end_seconds)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(url: str, process: Process, command: str, log: Path) -> None:
    """Wait until a server is ready; InputError when it ends before, or takes too long."""
    end = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise InputError(f"the server `{command}` is not ready: see {log}")
