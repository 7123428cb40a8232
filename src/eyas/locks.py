"""Outputs that one process writes at a time; the second one is refused."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eyas.errors import InputError
from eyas.files import write_errors

LOCK = ".lock"


@contextmanager
def locked_output(path: str | Path, part: str = "") -> Iterator[None]:
    """Keep other processes from writing into an output file or folder while the block runs.

    The lock is a file `.lock` in a folder, which must exist, or `.NAME.lock` next to a file. The
    operating system gives it up when its process ends, however that happens, so that a lock file
    of a dead process does not block. A device or a pipe is not locked.

    Args:
        path: the output.
        part: the part of the output that is locked; different parts may be written at once.

    Raises InputError when another process holds the lock, with its number and its machine, or
    when the lock file cannot be written.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    if path.exists() and not (path.is_dir() or path.is_file()):
        yield
        return
    name = f".{part}{LOCK}" if part else LOCK
    file = path / name if path.is_dir() else path.with_name(f".{path.name}{name}")
    lock = FileLock(file)
    try:
        if not file.parent.is_dir():  # filelock would make it
            raise FileNotFoundError(errno.ENOENT, "no such folder")
        lock.acquire(timeout=0)
        file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
    except Timeout:
        raise InputError(
            f"{path} is being written by {_holder(file)}: wait until it ends, or use another output"
        ) from None
    except OSError as error:
        raise InputError(f"cannot write into {path}: {(error.strerror or str(error)).lower()}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            file.write_text("")
        lock.release()


def _holder(file: Path) -> str:
    """Return the process that holds a lock, for people."""
    try:
        holder = json.loads(file.read_text())
        since = time.strftime("%H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']} (since {since})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def prepare_folder(folder: Path) -> None:
    """Make a folder and check that it can be written, before any work is done. InputError when not."""
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # another thread probes, too
