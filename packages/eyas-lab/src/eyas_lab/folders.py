"""Folders that a long run writes, and JSON files that say their format.

locked_folder         makes and locks an output folder
check_output_folder   whether a folder can be made and locked, asked before anything slow is done
remove_leftovers      removes temporary files of processes that are gone
read_versioned        reads a JSON file that says its format and version
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from eyas.errors import InputError
from eyas.files import parse_json, write_errors
from eyas.locks import locked_output, prepare_folder

__all__ = ["check_output_folder", "locked_folder", "read_versioned", "remove_leftovers"]

Content = TypeVar("Content")


class Readable(Protocol):
    """A file here or elsewhere."""

    def read_bytes(self) -> bytes:
        """Return the whole content."""


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make an output folder and keep other processes from writing into it while the block runs.
    InputError when another one holds its lock, or when it cannot be written.
    """
    prepare_folder(folder)
    with locked_output(folder):
        remove_leftovers(folder)
        yield


def check_output_folder(folder: str | Path, part: str = "") -> None:
    """Refuse a folder that cannot be written into, before anything slow is done. Nothing stays.

    Args:
        part: the part of the folder that the work locks, as for `locked_output`.

    Raises InputError when another process holds the lock, when the path is not a folder, or when it cannot be
    made. The work itself makes it and takes the lock again.
    """
    folder = Path(folder)
    if folder.is_dir():
        with locked_output(folder, part):
            return
    if folder.exists():
        raise InputError(f"cannot write into {folder}: it is a file; use a folder")
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)  # another process may do the same
    for path in missing:
        with suppress(OSError):  # another process uses it by now
            path.rmdir()


def remove_leftovers(folder: str | Path, name: str = "*") -> None:
    """Remove temporary files that killed processes left in a folder.

    Only files named as `write_atomically` names them, `.NAME.PID.tmp`, whose process does not run
    any more: a file that another process is writing right now stays.
    """
    for path in Path(folder).glob(f".{name}.tmp"):
        pid = re.search(r"\.(\d+)\.tmp$", path.name)
        if pid is None or not psutil.pid_exists(int(pid[1])):
            path.unlink(missing_ok=True)


def read_versioned(
    path: Readable,
    format_name: str,
    version: int,
    interpret: Callable[[dict[str, Any]], Content],
    missing: str,
    damaged: Callable[[str], InputError],
) -> Content:
    """Return the content of a JSON file whose keys "format" and "version" tell its kind.

    Args:
        version: the newest one that `interpret` knows.
        interpret: makes the content from the file's object; it may raise the errors that a wrong object causes
            in Python.
        missing: the message when there is no such file.
        damaged: the error for a file that holds something else, from the reason.

    Raises:
        InputError: there is no such file, or it cannot be read, is damaged or of a newer version.
    """
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(missing) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = parse_json(text)
        if fields["format"] == format_name and fields["version"] <= version:
            return interpret(fields)
        other = f"format {fields['format']!r}, version {fields['version']}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(type(error).__name__) from error
    raise InputError(f"{path} is of {other}: a newer eyas may read it")
