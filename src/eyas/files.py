"""Files that are always whole, whatever happens while they are written; and where the user's machine keeps what can be made again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["replaced", "user_cache"]


def user_cache() -> Path:
    """The folder of things that are worked out once for a machine, like `~/.cache/eyas`; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eyas"


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Written beside its place, renamed into it once it is on the disk: the file there is the old one or the new one. OSError when not."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
