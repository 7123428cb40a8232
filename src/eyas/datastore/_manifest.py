"""manifest.json of a datastore, and its files: written as a whole, checked by size when opened and
by SHA-256 on request.

This module knows no source and no suffix.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from eyas.datastore._suffixes import Array
from eyas.errors import InputError
from eyas.files import read_versioned, sha256_of_file, write_atomically

__all__ = [
    "DEPTH",
    "MANIFEST_FILE",
    "Manifest",
    "ReadSource",
    "StoredSegment",
    "damaged",
    "file_errors",
    "map_segment",
    "write_array",
]

FORMAT = "eyas-datastore"
VERSION = 1
MANIFEST_FILE = "manifest.json"
DEPTH = 64  # tokens to which suffixes are sorted


@dataclass(frozen=True)
class ReadSource:
    """A source whose documents are in the datastore."""

    name: str
    sha256: str  # hash of the file
    documents: int
    tokens: int


@dataclass(frozen=True)
class StoredSegment:
    """A segment on disk: two files, named by the hash of the tokens."""

    name: str
    tokens: int  # separators counted
    bytes: tuple[int, int]  # sizes of the two files, tokens and suffixes
    sha256: tuple[str, str]

    def paths(self, folder: Path) -> tuple[Path, Path]:
        """The files of the tokens and of the suffixes."""
        return folder / f"{self.name}.tokens.npy", folder / f"{self.name}.suffixes.npy"


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    tokenizer: dict[str, str]  # SHA-256 of its vocabulary and of its chat template
    tokenizer_name: str
    vocab_size: int  # the tokenizer's
    largest_token: int  # of all sources
    sources: tuple[ReadSource, ...]
    segments: tuple[StoredSegment, ...]
    versions: dict[str, str]

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def bytes(self) -> int:
        return sum(sum(stored.bytes) for stored in self.segments)

    @property
    def id(self) -> str:
        """A hash of everything in it but the versions."""
        content = {name: value for name, value in asdict(self).items() if name != "versions"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """InputError when it cannot be written; OSError when the disk is full."""
        content = {"format": FORMAT, "version": VERSION, "id": self.id, "sorted_to": DEPTH, **asdict(self)}
        with file_errors(folder / MANIFEST_FILE, "written"), write_atomically(folder / MANIFEST_FILE) as stream:
            stream.write((json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """InputError when there is none, or it is damaged or of a newer version."""
        path = folder / MANIFEST_FILE
        missing = f"{str(folder)!r} holds no datastore (no {MANIFEST_FILE}): make one with `eyas datastore build`"
        manifest, is_unchanged = read_versioned(
            path, FORMAT, VERSION, cls._from_content, missing, lambda reason: damaged(path, reason)
        )
        if not is_unchanged:
            raise damaged(path, "it was changed after it was written")
        if not manifest.segments or any(Path(stored.name).name != stored.name for stored in manifest.segments):
            raise damaged(path, "its segments are not in this folder")
        return manifest

    def check(self, folder: Path, on_file: Callable[[int], None] | None = None) -> None:
        """InputError when a file is missing or of another size.

        Args:
            on_file: if given, checksums are compared too, and it is called with the bytes of each
                file that was read.
        """
        for stored in self.segments:
            for path, size, sha256 in zip(stored.paths(folder), stored.bytes, stored.sha256, strict=True):
                with file_errors(path, "read"):
                    if path.stat().st_size != size:
                        raise damaged(path, f"{path.stat().st_size:,} bytes instead of {size:,}")
                    if on_file is not None:
                        if sha256_of_file(path) != sha256:
                            raise damaged(path, "its checksum is another")
                        on_file(size)

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> tuple[Manifest, bool]:
        """The manifest, and whether it is as it was written."""
        values = {field.name: content[field.name] for field in fields(cls)}
        values["sources"] = tuple(ReadSource(**source) for source in values["sources"])
        values["segments"] = tuple(
            StoredSegment(segment["name"], segment["tokens"], tuple(segment["bytes"]), tuple(segment["sha256"]))
            for segment in values["segments"]
        )
        manifest = cls(**values)
        return manifest, manifest.id == content["id"]


def damaged(path: Path, reason: str) -> InputError:
    """The error for a file that was changed."""
    return InputError(f"{path} is damaged ({reason}): delete the folder and build it again with `eyas datastore build`")


def map_segment(folder: Path, stored: StoredSegment) -> tuple[Array, Array]:
    """(tokens, suffixes), memory-mapped. InputError when a file is missing or holds something else."""
    arrays = []
    for path in stored.paths(folder):
        with file_errors(path, "read"):
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except ValueError as error:
                raise damaged(path, "no array") from error
    shapes, kinds = {array.shape for array in arrays}, (arrays[0].dtype.str, arrays[1].dtype.str)
    if shapes != {(stored.tokens,)} or kinds not in ((">u2", "<u4"), (">u4", "<u4")):
        raise damaged(stored.paths(folder)[0], "it holds something else")
    return arrays[0], arrays[1]


def write_array(path: Path, array: Array) -> tuple[int, str]:
    """Write an .npy file; returns (bytes, SHA-256). InputError when it cannot be written; OSError
    when the disk is full.
    """
    with file_errors(path, "written"), write_atomically(path) as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.view(np.uint8).data)
    return path.stat().st_size, sha256_of_file(path)


@contextmanager
def file_errors(path: Path, done: str) -> Iterator[None]:
    """Turn the system's errors into an InputError that names the file; a full disk stays an
    OSError.

    Args:
        done: what could not be done with the file, for example "read".
    """
    try:
        yield
    except FileNotFoundError as error:
        raise damaged(path, "missing") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(f"{path} cannot be {done}: {error.strerror}") from error
