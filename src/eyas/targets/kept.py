"""Files and folders in the user's cache that are removed when they take too much: those used least recently first."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from eyas.errors import OptionError

__all__ = ["limit_bytes", "remove_unused"]

RECENT_SECONDS = 600.0  # what was used so shortly before the newest one is not removed


def limit_bytes(variable: str, default_gb: float) -> float:
    """Return the size that a variable of the environment allows. Raise OptionError if it is not a number."""
    given = os.environ.get(variable) or str(default_gb)
    try:
        gigabytes = float(given)
    except ValueError:
        gigabytes = math.nan
    if not gigabytes >= 0:
        raise OptionError(
            f"{variable} must be a number of gigabytes, 0 or more, such as {default_gb:.0f}; it is {given!r}"
        )
    return gigabytes * 1e9


def remove_unused(paths: Iterable[Path], newest: Path, limit: float) -> None:
    """Remove files and folders until the others fit the limit, the newest one always left."""
    with suppress(OSError):  # another process removes them, too
        used = {path: path.stat().st_mtime for path in paths}
        for path in sorted(used, key=lambda path: -used[path]):
            limit -= sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
            if limit < 0 and path != newest and used[path] < used[newest] - RECENT_SECONDS:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
