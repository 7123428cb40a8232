"""Sources to segments: built, appended to, merged; interrupted at any time, and gone on with by the same call.

    sources --- tokens of each, in parts/ ---> grouped up to `segment_tokens` --- sorted ---> segments ---> manifest.json

The slow part is to make tokens of texts: it is kept source by source. A segment's files are named by the hash of its tokens, so a segment
that was sorted before the interrupt is found again. The manifest is replaced last; only then what it no longer names is removed.

This module knows no tokenizer and no file format of a source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.datastore._manifest import DEPTH, MANIFEST, Manifest, Read, Stored, mapped, told, write_array
from eyas.datastore._segment import Array, dtype_for, joined, separator_of, together
from eyas.datastore._suffixes import order_of
from eyas.errors import InputError, OptionError
from eyas.files import replaced

__all__ = ["Settings", "Source", "build"]

PARTS = "parts"
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How a datastore is made."""

    tokenizer: dict[str, str]  # what tells tokenizers apart
    tokenizer_name: str
    vocab_size: int  # of the tokenizer
    segment_tokens: int = 1 << 24  # tokens sorted together: bounds the memory, about 60 bytes each

    def __post_init__(self) -> None:
        if not 1 <= self.segment_tokens < 1 << 32:
            raise OptionError(f"tokens of a segment must be from 1 to 2^32 - 1, got {self.segment_tokens}")


@dataclass(frozen=True)
class Source:
    """A file: its name, the SHA-256 of its bytes, and how its documents are read."""

    name: str
    sha256: str
    read: Callable[[], Iterable[Sequence[int]]]


def build(
    folder: Path,
    settings: Settings,
    sources: Sequence[Source],
    versions: dict[str, str],
    *,
    append: bool = False,
    merge: bool = False,
    on_stage: OnStage = lambda _: None,
) -> Manifest:
    """Make the folder hold these sources, or, with `append`, these too. What is there already is not done again.

    Args:
        append: sources become segments of their own, beside those that are there.
        merge: everything is sorted together, in as few segments as `segment_tokens` allows: a look-up takes time by the segment.
        on_stage: told what is being done.

    Raises:
        InputError: the folder holds other sources (without `append`), or tokens of another tokenizer; a source has no tokens; a file
            cannot be written or is damaged.
    """
    old = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    new = _wanted(folder, old, settings, sources, append or not sources)
    if old is not None and not new and not (merge and len(old.segments) > 1):
        return old
    with told(folder, "made"):
        (folder / PARTS).mkdir(parents=True, exist_ok=True)
    parts = [_part(folder, settings, source, on_stage) for source in new]
    reads = tuple(read for read, _ in parts)
    keep = () if old is None or merge else old.segments
    again = [mapped(folder, stored)[0] for stored in old.segments] if old is not None and merge else []
    made = [_segment(folder, group, on_stage) for group in _groups([*again, *(array for _, array in parts)], settings)]
    largest = max([old.largest_token if old else -1, *(_largest(array) for _, array in parts)])
    names = {"tokenizer": settings.tokenizer, "tokenizer_name": settings.tokenizer_name, "vocab_size": settings.vocab_size}
    every = (*(old.sources if old else ()), *reads)
    manifest = Manifest(**names, largest_token=largest, sources=every, segments=(*keep, *made), versions=versions)  # type: ignore[arg-type]
    manifest.write(folder)
    _clean(folder, manifest)
    return manifest


def _wanted(folder: Path, old: Manifest | None, settings: Settings, sources: Sequence[Source], append: bool) -> list[Source]:
    """The sources that are not there yet; InputError when they cannot go together with what is there."""
    unique = list({source.sha256: source for source in sources}.values())
    if old is None:
        if not unique:
            raise InputError(f"{str(folder)!r} holds no datastore to append to or to merge: name data to build one")
        return unique
    other = [part for part in settings.tokenizer if settings.tokenizer[part] != old.tokenizer.get(part)]
    if other:
        raise InputError(
            f"{folder} holds tokens of another tokenizer ({old.tokenizer_name!r}; its {other[0]} differs): name that one, or another folder"
        )
    there = {source.sha256 for source in old.sources}
    if not append and {source.sha256 for source in unique} != there:
        names = ", ".join(source.name for source in old.sources)
        raise InputError(f"{folder} holds other data ({names}): append to it, or name another folder")
    return [source for source in unique if source.sha256 not in there]


# --- parts -----------------------------------------------------------------------------------------------------------------------------


def _part(folder: Path, settings: Settings, source: Source, on_stage: OnStage) -> tuple[Read, Array]:
    """The tokens of a source: read now, or before an interrupt."""
    key = hashlib.sha256(json.dumps([source.sha256, settings.tokenizer, settings.vocab_size]).encode()).hexdigest()[:32]
    path = folder / PARTS / f"{key}.npy"
    dtype = dtype_for(settings.vocab_size)
    if not path.exists():
        on_stage(f"reading {source.name}")
        write_array(path, joined(_checked(source, settings), dtype))
    with told(path, "read"):
        tokens_T: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    documents = int((tokens_T == separator_of(dtype)).sum())
    return Read(source.name, source.sha256, documents, len(tokens_T) - documents), tokens_T


def _checked(source: Source, settings: Settings) -> Iterator[Sequence[int]]:
    """Its documents; InputError when there is none, or a token is none of the tokenizer's."""
    empty = True
    for document in source.read():
        if len(document):
            empty = False
            low, high = min(document), max(document)
            if low < 0 or high >= settings.vocab_size:
                raise InputError(f"{source.name} has token {low if low < 0 else high}, the vocabulary is 0..{settings.vocab_size - 1}")
            yield document
    if empty:
        raise InputError(f"{source.name} has no tokens: there is nothing to look up in it")


def _largest(tokens_T: Array) -> int:
    return int(tokens_T[tokens_T != separator_of(tokens_T.dtype)].max())


# --- segments --------------------------------------------------------------------------------------------------------------------------


def _groups(arrays: Sequence[Array], settings: Settings) -> Iterator[Array]:
    """Documents, in order, in texts of at most `segment_tokens`; a longer document is cut."""
    most, group, size = settings.segment_tokens, list[Array](), 0
    for array in arrays:
        for piece in _pieces(array, most):
            if group and size + len(piece) > most:
                yield together(group, piece.dtype)
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    if group:
        yield together(group, group[0].dtype)


def _pieces(tokens_T: Array, most: int) -> Iterator[Array]:
    """Cut behind the last document that fits, or within one that alone does not."""
    end = np.array([separator_of(tokens_T.dtype)], tokens_T.dtype)
    while len(tokens_T) > most:
        ends = np.flatnonzero(tokens_T[:most] == end)
        size = int(ends[-1]) + 1 if len(ends) else most - 1
        yield tokens_T[:size] if len(ends) else together([tokens_T[:size], end], end.dtype)
        tokens_T = tokens_T[size:]
    yield tokens_T


def _segment(folder: Path, tokens_T: Array, on_stage: OnStage) -> Stored:
    """Sort, unless that was done before, and write."""
    name = hashlib.sha256(tokens_T.view(np.uint8).data).hexdigest()[:24]
    said = folder / PARTS / f"{name}.json"
    stored = Stored(name, len(tokens_T), (0, 0), ("", ""))
    if said.exists() and all(stored.path(folder, kind).exists() for kind in ("tokens", "suffixes")):
        held: dict[str, Any] = json.loads(said.read_text())
        return Stored(name, len(tokens_T), tuple(held["bytes"]), tuple(held["sha256"]))
    on_stage(f"sorting {len(tokens_T):,} tokens")
    size, digest = write_array(stored.path(folder, "tokens"), tokens_T)
    order_size, order_digest = write_array(stored.path(folder, "suffixes"), order_of(tokens_T, DEPTH))
    with told(said, "written"), replaced(said) as stream:
        stream.write(json.dumps({"bytes": [size, order_size], "sha256": [digest, order_digest]}).encode())
    return Stored(name, len(tokens_T), (size, order_size), (digest, order_digest))


def _clean(folder: Path, manifest: Manifest) -> None:
    """Remove what an interrupted build left, and segments that were merged away."""
    named = {stored.path(folder, kind) for stored in manifest.segments for kind in ("tokens", "suffixes")}
    for path in [*folder.glob("*.npy"), *folder.glob(".*.tmp"), *(folder / PARTS).glob("*")]:
        if path not in named:
            path.unlink(missing_ok=True)
    (folder / PARTS).rmdir()
