"""Files that stay whole even if writing them fails halfway. `eyas.locks` is for outputs of several files.

    write_atomically    a file is replaced as a whole: temporary name, fsync, rename
    sha256_of_file      the checksum by which a changed file is noticed; sha256_of_folder: those of all files
    kept_sha256         the same, computed once for as long as the system says that the file is unchanged
    is_altered          whether a file differs from the checksum that was shipped with it
    parse_json          a JSON value, or one clear error
    sync_folder         makes a rename in a folder durable
    write_text          a small file as a whole
    write_errors        the system's errors while a file is written, as one clear error
    to_int8, from_int8  matrices rounded to int8 with a scale for each row, and back
    user_cache          the folder of measurements and compiled kernels of this machine

Else this module does not know the contents of the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from eyas.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHECKSUMS", "SCALE", "from_int8", "is_altered", "kept_sha256", "parse_json", "sha256_of_file",
    "sha256_of_folder", "sync_folder", "to_int8", "user_cache", "write_atomically", "write_errors", "write_text",
]  # fmt: skip

CHECKSUMS = "checksums.json"  # {"path below the folder": "SHA-256 in hexadecimal"}
SCALE = ".scale"  # tensor `x.scale` [rows] belongs to the int8 matrix `x` [rows, columns]


def user_cache() -> Path:
    """Return the folder for results that are computed once per machine, like `~/.cache/eyas`.

    It may not exist yet. A user without a home folder (an unknown user id in a container) gets one
    among the temporary files.
    """
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache").expanduser() / "eyas"
    except RuntimeError:  # HOME is not set, and the system does not know the user
        user = os.getuid() if hasattr(os, "getuid") else "cache"  # Windows: its temporary folder is the user's own
        return Path(tempfile.gettempdir()) / f"eyas-{user}"


def sha256_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. Raises OSError when it cannot be read."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def kept_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a large file, which is kept in the user's cache: it is computed again when the
    file's size, times or place on the disk have changed. Raises OSError when it cannot be read.

    A change that the system does not record, such as a failing disk's, is not noticed.
    """
    path = Path(path).resolve()
    status = path.stat()
    identity = [str(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    kept = user_cache() / "checksums" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["file"] == identity:
            return str(known["sha256"])
    computed = sha256_of_file(path)
    with suppress(OSError):  # without a cache folder it is computed again the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(kept) as stream:
            stream.write(json.dumps({"file": identity, "sha256": computed}).encode())
    return computed


def sha256_of_folder(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path there: the content of CHECKSUMS."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {path.relative_to(folder).as_posix(): sha256_of_file(path) for path in files}


def is_altered(path: str | Path) -> bool:
    """Return whether a checksums.json, in the file's folder or the one above it, has another SHA-256 for
    the file."""
    path = Path(path).absolute()
    for folder in path.parents[:2]:
        try:
            expected = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))[path.relative_to(folder).as_posix()]
            return len(expected) == 64 and sha256_of_file(path) != expected
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # no checksums, or none for this file
            continue
    return False


@contextmanager
def write_atomically(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file so that `path` always holds either the old content or the new one, never a part.

    The bytes go to a temporary file in the same folder, which is flushed to the disk and then
    renamed. When the block raises, the old file stays and the temporary file is removed.

    Yields: a binary stream to write to. Raises OSError when the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Not every file system can do this."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- reading and writing text


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text, for example of one line of a file.

    Raises InputError, without a place, for every other text: bytes that are not UTF-8, text that is not JSON,
        values nested deeper than Python can read, numbers of more digits than it converts.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise InputError("JSON that is nested too deeply") from error
    except ValueError as error:  # Python converts no number of more than 4,300 digits
        raise InputError("JSON with a number of too many digits") from error


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the system's errors while a file is written into an InputError that names it."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter for the former
        is_full = getattr(error, "errno", None) == errno.ENOSPC
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(
            f"cannot write {path}: {'no space left; free some and resume' if is_full else reason}"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file as a whole. InputError when it cannot be written."""
    with write_errors(path), write_atomically(path) as stream:
        stream.write(text.encode())


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices of floats to int8, with the largest absolute value of a row at 127; convert other floats to float32.
    Kernels that draft with int8 weights round in the same way."""
    import torch

    packed = {}
    for name, value in tensors.items():
        wide = value.float() if value.is_floating_point() else value
        packed[name] = wide
        if value.is_floating_point() and wide.ndim == 2:
            scale = wide.abs().amax(1).clamp(min=1e-12) / 127
            packed[name] = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            packed[name + SCALE] = scale
    return packed


def from_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with float32 matrices in place of those that `to_int8` packed; all others as they are."""
    scales = {name + SCALE for name, value in tensors.items() if str(value.dtype) == "torch.int8"} & tensors.keys()
    return {
        name: value.float() * tensors[name + SCALE][:, None] if name + SCALE in scales else value
        for name, value in tensors.items()
        if name not in scales
    }
