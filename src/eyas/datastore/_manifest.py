"""manifest.json of a datastore, and its files: always whole, checked by size when opened and by SHA-256 when asked.

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

from eyas.datastore._segment import Array
from eyas.errors import InputError
from eyas.files import replaced

__all__ = ["DEPTH", "MANIFEST", "Manifest", "Read", "Stored", "damaged", "mapped", "replaced", "told", "write_array"]

FORMAT, VERSION = "eyas-datastore", 1
MANIFEST = "manifest.json"
DEPTH = 64  # tokens to which suffixes are sorted
KINDS = ("tokens", "suffixes")


@dataclass(frozen=True)
class Read:
    """A source that was read."""

    name: str
    sha256: str  # of the file
    documents: int
    tokens: int


@dataclass(frozen=True)
class Stored:
    """A segment: two files, named by what is in them."""

    name: str
    tokens: int  # separators counted
    bytes: tuple[int, int]  # of the file of tokens and that of suffixes
    sha256: tuple[str, str]

    def path(self, folder: Path, kind: str) -> Path:
        return folder / f"{self.name}.{kind}.npy"


@dataclass(frozen=True)
class Manifest:
    """What a datastore is made of."""

    tokenizer: dict[str, str]  # SHA-256 of its vocabulary and of its chat template
    tokenizer_name: str
    vocab_size: int  # of the tokenizer
    largest_token: int  # that occurs
    sources: tuple[Read, ...]
    segments: tuple[Stored, ...]
    versions: dict[str, str]

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def bytes(self) -> int:
        return sum(sum(stored.bytes) for stored in self.segments)

    @property
    def id(self) -> str:
        """A hash of everything that was found out about the data."""
        held = {name: value for name, value in asdict(self).items() if name != "versions"}
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        held = {"format": FORMAT, "version": VERSION, "id": self.id, "sorted_to": DEPTH, **asdict(self)}
        with told(folder / MANIFEST, "written"), replaced(folder / MANIFEST) as stream:
            stream.write((json.dumps(held, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """InputError when there is none, or it cannot be understood."""
        path = folder / MANIFEST
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["format"] != FORMAT or held["version"] > VERSION:
                raise InputError(f"{path} is of format {held['format']!r}, version {held['version']}: a newer eyas may read it")
            found = cls._from(held)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"{str(folder)!r} holds no datastore (no {MANIFEST}): make one with `eyas datastore build`") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise damaged(path, type(error).__name__) from error
        if found.id != held["id"]:
            raise damaged(path, "it was changed after it was written")
        if not found.segments or any(Path(stored.name).name != stored.name for stored in found.segments):
            raise damaged(path, "its segments are not in this folder")
        return found

    def check(self, folder: Path, thoroughly: Callable[[int], None] | None = None) -> None:
        """InputError when a file is missing or of another size; `thoroughly`: or of another checksum, told the bytes of each file read."""
        for stored in self.segments:
            for kind, size, sha256 in zip(KINDS, stored.bytes, stored.sha256, strict=True):
                path = stored.path(folder, kind)
                with told(path, "read"):
                    if path.stat().st_size != size:
                        raise damaged(path, f"{path.stat().st_size:,} bytes instead of {size:,}")
                    if thoroughly is not None:
                        if _digest(path) != sha256:
                            raise damaged(path, "its checksum is another")
                        thoroughly(size)

    @classmethod
    def _from(cls, held: dict[str, Any]) -> Manifest:
        own = {field.name: held[field.name] for field in fields(cls)}
        sources = tuple(Read(**source) for source in own.pop("sources"))
        segments = own.pop("segments")
        stored = tuple(Stored(s["name"], s["tokens"], tuple(s["bytes"]), tuple(s["sha256"])) for s in segments)
        return cls(sources=sources, segments=stored, **own)


def damaged(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is damaged ({reason}): delete the folder and build it again with `eyas datastore build`")


def mapped(folder: Path, stored: Stored) -> tuple[Array, Array]:
    """(tokens, suffixes), not read before they are looked at."""
    arrays = []
    for kind in KINDS:
        path = stored.path(folder, kind)
        with told(path, "read"):
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except ValueError as error:
                raise damaged(path, "no array") from error
    shapes, kinds = {array.shape for array in arrays}, (arrays[0].dtype.str, arrays[1].dtype.str)
    if shapes != {(stored.tokens,)} or kinds not in ((">u2", "<u4"), (">u4", "<u4")):
        raise damaged(stored.path(folder, "tokens"), "it holds something else")
    return arrays[0], arrays[1]


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_array(path: Path, array: Array) -> tuple[int, str]:
    """An .npy file; returns (bytes, SHA-256). InputError when it cannot be written; OSError when the disk is full."""
    with told(path, "written"), replaced(path) as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.view(np.uint8).data)
    return path.stat().st_size, _digest(path)


@contextmanager
def told(path: Path, done: str) -> Iterator[None]:
    """What the system says, as one line; a full disk stays what it is."""
    try:
        yield
    except FileNotFoundError as error:
        raise damaged(path, "missing") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(f"{path} cannot be {done}: {error.strerror}") from error
