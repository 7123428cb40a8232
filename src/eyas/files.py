"""Files that are always whole, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["replaced"]


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
