"""Sources to segments: built, appended to, merged; an interrupted build continues by the same call.

    sources --- tokens of each, in parts/ ---> grouped up to `segment_tokens` --- sorted ---> segments ---> manifest.json

Tokenizing is the slow part: its result is kept source by source. The files of a segment are named
by the hash of its tokens, so a segment that was sorted before an interrupt is found again. Both are
used again only if their checksums are right. The manifest is replaced last; only then are files
removed that it no longer names.

This module knows no tokenizer and no file format of a source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.datastore._manifest import (
    DEPTH,
    MANIFEST_FILE,
    Manifest,
    ReadSource,
    StoredSegment,
    file_errors,
    map_segment,
    write_array,
)
from eyas.datastore._segment import concatenate, dtype_for, join_documents, separator_of
from eyas.datastore._suffixes import Array, order_of
from eyas.errors import InputError, OptionError
from eyas.files import locked_output, parse_json, remove_leftovers, sha256_of_file, write_atomically

__all__ = ["Settings", "Source", "build"]

PARTS = "parts"
OnStage = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Settings of a datastore."""

    tokenizer: dict[str, str]  # identifies the tokenizer: SHA-256 of its parts
    tokenizer_name: str
    vocab_size: int  # the tokenizer's
    segment_tokens: int = 1 << 24  # tokens sorted together: bounds the memory, about 60 bytes each

    def __post_init__(self) -> None:
        if not 1 <= self.segment_tokens < 1 << 32:
            raise OptionError(f"tokens of a segment must be from 1 to 2^32 - 1, got {self.segment_tokens}")


@dataclass(frozen=True)
class Source:
    """A file: its name, the SHA-256 of its bytes, and a function that reads its documents."""

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
    """Make the folder hold these sources, or, with `append`, these in addition to its own. Sources
    that it holds already are not read again.

    Args:
        append: the sources become segments of their own, in addition to the existing ones.
        merge: everything is sorted together, in as few segments as `segment_tokens` allows: each
            segment costs look-ups time.
        on_stage: called with a description of each stage.

    Raises:
        InputError: the folder holds other sources (without `append`), or tokens of another
            tokenizer; a source has no tokens; a file is damaged or cannot be written; another
            process is building in the folder.
    """

    def plan() -> tuple[Manifest | None, list[Source], bool]:
        old = Manifest.read(folder) if (folder / MANIFEST_FILE).exists() else None
        new = _new_sources(folder, old, settings, sources, append or not sources)
        return old, new, old is not None and not new and not (merge and len(old.segments) > 1)

    old, new, is_done = plan()
    if not is_done:
        with file_errors(folder, "made"):
            folder.mkdir(parents=True, exist_ok=True)
        with locked_output(folder):
            old, new, is_done = plan()  # another build may just have ended
            if not is_done:
                return _build(folder, settings, old, new, versions, merge, on_stage)
    assert old is not None
    return old


def _build(
    folder: Path,
    settings: Settings,
    old: Manifest | None,
    new: Sequence[Source],
    versions: dict[str, str],
    merge: bool,
    on_stage: OnStage,
) -> Manifest:
    with file_errors(folder, "made"):
        (folder / PARTS).mkdir(exist_ok=True)
    if old is not None and merge:
        old.check(folder, lambda _: None)  # a damaged segment must not get a new checksum
    parts = [_part(folder, settings, source, on_stage) for source in new]
    kept_segments = () if old is None or merge else old.segments
    merged = [map_segment(folder, stored)[0] for stored in old.segments] if old is not None and merge else []
    groups = _groups([*merged, *(tokens_T for _, tokens_T in parts)], settings)
    new_segments = [_segment(folder, group, on_stage) for group in groups]
    manifest = Manifest(
        tokenizer=settings.tokenizer,
        tokenizer_name=settings.tokenizer_name,
        vocab_size=settings.vocab_size,
        largest_token=max([old.largest_token if old else -1, *(_largest(tokens_T) for _, tokens_T in parts)]),
        sources=(*(old.sources if old else ()), *(source for source, _ in parts)),
        segments=(*kept_segments, *new_segments),
        versions=versions,
    )
    manifest.write(folder)
    _remove_unnamed(folder, manifest)
    return manifest


def _new_sources(
    folder: Path, old: Manifest | None, settings: Settings, sources: Sequence[Source], append: bool
) -> list[Source]:
    """The sources that the folder does not hold yet. InputError when they do not belong together
    with what it holds.
    """
    unique = list({source.sha256: source for source in sources}.values())
    if old is None:
        if not unique:
            raise InputError(f"{str(folder)!r} holds no datastore to append to or to merge: name data to build one")
        return unique
    different = [part for part in settings.tokenizer if settings.tokenizer[part] != old.tokenizer.get(part)]
    if different:
        raise InputError(
            f"{folder} holds tokens of another tokenizer ({old.tokenizer_name!r}; its {different[0]} differs): "
            "name that one, or another folder"
        )
    existing = {source.sha256 for source in old.sources}
    if not append and {source.sha256 for source in unique} != existing:
        names = ", ".join(source.name for source in old.sources)
        raise InputError(f"{folder} holds other data ({names}): append to it, or name another folder")
    return [source for source in unique if source.sha256 not in existing]


# --- parts


def _part(folder: Path, settings: Settings, source: Source, on_stage: OnStage) -> tuple[ReadSource, Array]:
    """The tokens of a source, read now or before an interrupt."""
    key = hashlib.sha256(json.dumps([source.sha256, settings.tokenizer, settings.vocab_size]).encode()).hexdigest()[:32]
    path, dtype = folder / PARTS / f"{key}.npy", dtype_for(settings.vocab_size)
    if not _is_intact(folder, key, [path]):
        on_stage(f"reading {source.name}")
        _write_checksums(folder, key, [write_array(path, join_documents(_checked(source, settings), dtype))])
    with file_errors(path, "read"):
        tokens_T: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    documents = int((tokens_T == separator_of(dtype)).sum())
    return ReadSource(source.name, source.sha256, documents, len(tokens_T) - documents), tokens_T


def _checked(source: Source, settings: Settings) -> Iterator[Sequence[int]]:
    """The documents of a source. InputError when there is none, or a token is not in the
    vocabulary.
    """
    is_empty = True
    for document in source.read():
        if len(document):
            is_empty = False
            low, high = min(document), max(document)
            if low < 0 or high >= settings.vocab_size:
                raise InputError(
                    f"{source.name} has token {low if low < 0 else high}, the vocabulary is 0..{settings.vocab_size - 1}"
                )
            yield document
    if is_empty:
        raise InputError(f"{source.name} has no tokens: there is nothing to look up in it")


def _largest(tokens_T: Array) -> int:
    return int(tokens_T[tokens_T != separator_of(tokens_T.dtype)].max())


# --- segments


def _groups(arrays: Sequence[Array], settings: Settings) -> Iterator[Array]:
    """The documents, in order, in texts of at most `segment_tokens`; a longer document is cut."""
    most, size = settings.segment_tokens, 0
    group: list[Array] = []
    for array in arrays:
        for piece in _pieces(array, most):
            if group and size + len(piece) > most:
                yield concatenate(group, piece.dtype)
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    if group:
        yield concatenate(group, group[0].dtype)


def _pieces(tokens_T: Array, most: int) -> Iterator[Array]:
    """Pieces of at most `most` tokens, cut after the last document that fits, or inside a document
    that alone is longer.
    """
    separator = np.array([separator_of(tokens_T.dtype)], tokens_T.dtype)
    while len(tokens_T) > most:
        ends = np.flatnonzero(tokens_T[:most] == separator)
        size = int(ends[-1]) + 1 if len(ends) else most - 1
        yield tokens_T[:size] if len(ends) else concatenate([tokens_T[:size], separator], separator.dtype)
        tokens_T = tokens_T[size:]
    yield tokens_T


def _segment(folder: Path, tokens_T: Array, on_stage: OnStage) -> StoredSegment:
    """Sort a text and write it, unless that was done before an interrupt."""
    name = hashlib.sha256(tokens_T.view(np.uint8).data).hexdigest()[:24]
    stored = StoredSegment(name, len(tokens_T), (0, 0), ("", ""))
    paths = stored.paths(folder)
    if not _is_intact(folder, name, paths):
        on_stage(f"sorting {len(tokens_T):,} tokens")
        written = [write_array(paths[0], tokens_T), write_array(paths[1], order_of(tokens_T, DEPTH))]
        _write_checksums(folder, name, written)
    sizes, digests = _read_checksums(folder, name)
    return StoredSegment(name, len(tokens_T), (sizes[0], sizes[1]), (digests[0], digests[1]))


# --- checksums during a build


def _checksums_file(folder: Path, name: str) -> Path:
    return folder / PARTS / f"{name}.json"


def _write_checksums(folder: Path, name: str, written: Sequence[tuple[int, str]]) -> None:
    """Note (bytes, SHA-256) of each file that was written."""
    sizes, digests = zip(*written, strict=True)
    path = _checksums_file(folder, name)
    with file_errors(path, "written"), write_atomically(path) as stream:
        stream.write(json.dumps({"bytes": list(sizes), "sha256": list(digests)}).encode())


def _read_checksums(folder: Path, name: str) -> tuple[list[int], list[str]]:
    """The sizes and the SHA-256 of the files."""
    content = parse_json(_checksums_file(folder, name).read_bytes())
    return content["bytes"], content["sha256"]


def _is_intact(folder: Path, name: str, paths: Sequence[Path]) -> bool:
    """Whether an earlier, interrupted build wrote these files, and they are unchanged."""
    try:
        return _read_checksums(folder, name)[1] == [sha256_of_file(path) for path in paths]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _remove_unnamed(folder: Path, manifest: Manifest) -> None:
    """Remove what interrupted builds left, and segments that were merged into others."""
    listed = {path for stored in manifest.segments for path in stored.paths(folder)}
    remove_leftovers(folder)
    for path in [*folder.glob("*.npy"), *(folder / PARTS).glob("*"), *(folder / PARTS).glob(".*.tmp")]:
        if path not in listed:
            path.unlink(missing_ok=True)
    (folder / PARTS).rmdir()
