"""Where data is read from: a file of this machine, or a URL that fsspec opens (s3://, gs://, hf://, https://, ...),
which is read as a stream. Each row of a Parquet file is read as the JSON object that it would be as a line of a
JSONL file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eyas.errors import EyasError, InputError, OptionError, first_line

PARQUET = ".parquet"
ROWS = 256  # of a Parquet file that are in memory at a time


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, also one of fsspec's chains of them, such as simplecache::s3://bucket/chats.jsonl."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        path = next(part for part in self.url.split("::") if "://" in part)
        return path.partition("://")[2].partition("?")[0].rpartition("/")[2]

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url.rstrip('/')}/{name}")

    def read_bytes(self) -> bytes:
        """Return the whole content. Raise InputError or OptionError if it cannot be read."""
        with read_errors(self), opened(self) as stream:
            return stream.read()


File = Path | RemoteFile


def as_file(path: str | Path | RemoteFile) -> File:
    """Return a path or URL as a file."""
    if isinstance(path, str):
        return RemoteFile(path) if "://" in path else Path(path)
    return path


@contextmanager
def read_errors(file: File) -> Iterator[None]:
    """Turn the errors of the system, or of the library that reads a URL, into one line."""
    try:
        yield
    except EyasError:
        raise
    except FileNotFoundError as error:
        if (cause := error.__cause__) is None or isinstance(cause, FileNotFoundError):
            raise InputError(f"{file} does not exist; check the path") from error
        # fsspec says so of a server that refuses or does not answer, too
        raise InputError(f"{file} cannot be found: {first_line(cause)}") from error
    except IsADirectoryError as error:
        raise InputError(f"{file} is a folder; pass the files in it") from error
    except (OSError, EOFError, zlib.error) as error:  # the last two: a .gz that ends early or is damaged
        raise InputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:  # the libraries of stores raise errors of their own
        if isinstance(file, Path):
            raise
        raise InputError(f"{file} cannot be read: {first_line(error)}") from error


def opened(file: File) -> io.BufferedReader:
    """Open a file for its bytes; the caller closes it."""
    if isinstance(file, Path):
        return open(file, "rb")
    import fsspec

    with package_errors(file):
        stream = fsspec.open(file.url, "rb").open()
    return io.BufferedReader(stream)


@contextmanager
def open_file(file: File) -> Iterator[IO[bytes]]:
    """Open a file for its bytes, unpacked if it is a .gz. Raise InputError, also inside the block."""
    with read_errors(file), opened(file) as plain:
        is_gzip = plain.peek(2)[:2] == b"\x1f\x8b"
        yield io.BufferedReader(gzip.GzipFile(fileobj=plain)) if is_gzip else plain


@contextmanager
def package_errors(file: RemoteFile) -> Iterator[None]:
    """Turn a missing package into OptionError, with the command that installs it."""
    try:
        yield
    except ImportError as error:
        raise OptionError(f"{file} cannot be read: {first_line(error)}{_repair(file)}") from error


def _repair(file: RemoteFile) -> str:
    """Return the command that installs the reader of a URL, if there is more than fsspec's own message."""
    from fsspec.registry import known_implementations

    protocols = [part.partition("://")[0] for part in file.url.split("::")]
    packages = {
        known_implementations[name]["class"].partition(".")[0] for name in protocols if name in known_implementations
    }
    missing = sorted(packages - {"fsspec", "huggingface_hub"})
    return f"; pip install {' '.join(missing)}" if missing else ""


def is_parquet(file: File) -> bool:
    """Return whether a file's name ends in .parquet."""
    return file.name.lower().endswith(PARQUET)


def parquet_rows(file: File) -> Iterator[bytes]:
    """Yield each row of a Parquet file as JSON, without its nulls: a table cannot tell them from absent keys."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise OptionError(
            f"{file}: files in Parquet need pyarrow: pip install '.[parquet]' in a clone of eyas"
        ) from error
    with read_errors(file), opened(file) as stream:
        try:
            for batch in ParquetFile(stream).iter_batches(ROWS):
                for row in batch.to_pylist():
                    yield json.dumps(_without_nulls(row), default=str).encode()
        except ArrowException as error:
            raise InputError(f"{file} is damaged or incomplete, not a file in Parquet: {first_line(error)}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value
