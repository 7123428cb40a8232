"""A datastore: texts as token ids, searched for the longest suffix of a context (REST, He et al.
2023, arXiv 2311.08252, section 3).

    tokens     documents, each followed by a separator, which is not a token; big-endian, so that comparing bytes compares tokens
    suffixes   the positions of all suffixes, sorted by their first DEPTH tokens (a suffix array)

The suffixes that begin with a pattern are neighbours in this order, sorted by the tokens that
follow: two binary searches find them.

    FOLDER/manifest.json    tokenizer and sources
           tokens.npy, suffixes.npy

`build` makes a folder once, in a temporary one that is renamed when it is whole. Its arrays are
memory-mapped: opening takes no time, and the system's cache is the memory.

Shapes: T tokens, S matches, D tokens after a match. This module knows no model, no tokenizer, no
file format of a source and no tree.
"""

from __future__ import annotations

import json
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import InputError
from eyas.files import write_errors
from eyas_lab.folders import read_versioned

__all__ = ["DEPTH", "Datastore", "Manifest", "Matches", "Settings", "Source", "build", "order_of"]

FORMAT = "eyas-datastore"
VERSION = 2
DEPTH = 64  # tokens to which suffixes are sorted
MAX_TOKENS = (1 << 32) - 1  # positions have four bytes
BUILD_IT = "with `eyas datastore build`"

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Settings:
    """Which tokenizer the tokens are of."""

    tokenizer: dict[str, str]  # SHA-256 of its parts
    tokenizer_name: str
    vocab_size: int  # the tokenizer's


@dataclass(frozen=True)
class Source:
    """A file: its name, the SHA-256 of its bytes, and a function that reads its documents."""

    name: str
    sha256: str
    read: Callable[[], Iterable[Sequence[int]]]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    tokenizer: dict[str, str]
    tokenizer_name: str
    largest_token: int
    sources: tuple[dict[str, Any], ...]  # name, sha256, documents, tokens of each
    tokens: int  # separators counted
    versions: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder. Raise InputError if there is none, or it is damaged or newer."""
        path = folder / "manifest.json"
        missing = f"{str(folder)!r} holds no datastore (no {path.name}): make one {BUILD_IT}"
        return read_versioned(
            path, FORMAT, VERSION, cls._from_content, missing, lambda reason: _damage_error(path, reason)
        )

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Manifest:
        values = {field.name: content[field.name] for field in fields(cls)}
        return cls(**{**values, "sources": tuple(values["sources"])})


@dataclass(frozen=True)
class Matches:
    """The occurrences of a context's suffix in a datastore, and their continuations."""

    length: int  # tokens of the suffix
    count: int  # occurrences
    following_SD: Array  # tokens after an even sample of them, sorted; `separator` from the end of a document on


class Datastore:
    """Looks contexts up. A match and its continuation have at most DEPTH tokens together, as the
    suffixes are sorted to that depth.
    """

    def __init__(self, tokens_T: Array, suffixes_T: Array, vocab_size: int) -> None:
        """`vocab_size`: above all tokens."""
        assert tokens_T.dtype in (np.dtype(">u2"), np.dtype(">u4")), "tokens must be big-endian"
        # plain arrays over the same memory, as indexing a np.memmap is slow
        self.tokens_T, self.suffixes_T = tokens_T.view(np.ndarray), suffixes_T.view(np.ndarray)
        self.vocab_size = vocab_size
        self.separator = _separator_of(tokens_T.dtype)
        self._token_bytes = tokens_T.dtype.itemsize
        self._bytes = self.tokens_T.view(np.uint8).data

    @classmethod
    def open(cls, folder: Path) -> Datastore:
        """Open a folder that `build` wrote. Raise InputError if there is none, or files are missing
        or hold something else.
        """
        manifest, arrays = Manifest.read(folder), list[Array]()
        for name, kinds in (("tokens.npy", (">u2", ">u4")), ("suffixes.npy", ("<u4",))):
            path = folder / name
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except FileNotFoundError as error:
                raise _damage_error(path, "missing") from error
            except ValueError as error:  # cut off, or no array
                raise _damage_error(path, "no whole array") from error
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from error
            if array.shape != (manifest.tokens,) or array.dtype.str not in kinds:
                raise _damage_error(path, "it holds something else")
            arrays.append(array)
        tokens_T, suffixes_T = arrays
        return cls(tokens_T, suffixes_T, manifest.largest_token + 1)

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
        """Return a datastore in memory."""
        tokens_T = _join(documents, _dtype_for(vocab_size))
        return cls(tokens_T, order_of(tokens_T, DEPTH), vocab_size)

    def look_up(
        self, context: Sequence[int], shortest: int, longest: int, depth: int, max_matches: int
    ) -> Matches | None:
        """Find the longest suffix of `context` that the datastore contains, with its continuations.

        Args:
            shortest, longest: bounds of the suffix's number of tokens.
            depth: tokens of a continuation; longest + depth is at most DEPTH.
            max_matches: continuations of a frequent suffix; they are an even sample of all.

        Returns:
            None if the suffix of `shortest` tokens does not occur.
        """
        assert longest + depth <= DEPTH
        if (found := self._longest(context, shortest, longest)) is None:
            return None
        length, begin, end = found
        count = end - begin
        slot_S = begin + (np.arange(count) if count <= max_matches else np.arange(max_matches) * count // max_matches)
        after_S1 = self.suffixes_T[slot_S].astype(np.int64)[:, None] + length
        # at the end of the text, the last separator is repeated
        following_SD: Array = self.tokens_T[np.minimum(after_S1 + np.arange(depth), len(self.tokens_T) - 1)]
        # no target can embed the values of a damaged file
        following_SD[following_SD >= self.vocab_size] = self.separator
        return Matches(length, count, following_SD)

    def _longest(self, context: Sequence[int], shortest: int, longest: int) -> tuple[int, int, int] | None:
        """Return (length of the longest suffix of the context that the text contains, its first slot, the slot after
        its last one).

        The text contains a shorter suffix wherever it contains a longer one, so the length is found
        by bisection too.
        """
        dtype, slots = self.tokens_T.dtype, range(len(self.suffixes_T))
        tokens = np.asarray(context[max(0, len(context) - longest) :], np.int64)
        too_large = np.flatnonzero(tokens > np.iinfo(dtype).max)  # a target may have more tokens than its tokenizer
        if len(too_large):
            tokens = tokens[too_large[-1] + 1 :]
        longest, pattern = len(tokens), tokens.astype(dtype).tobytes()
        low, high, begin = shortest - 1, longest, 0
        while low < high:
            length = (low + high + 1) // 2 if low >= shortest else shortest
            suffix = pattern[(longest - length) * self._token_bytes :]
            read = self._reader(len(suffix))
            slot = bisect_left(slots, suffix, key=read)
            if slot < len(slots) and read(slot) == suffix:
                low, begin = length, slot
            else:
                high = length - 1
        if low < shortest:
            return None
        suffix = pattern[(longest - low) * self._token_bytes :]
        return low, begin, bisect_right(slots, suffix, lo=begin, key=self._reader(len(suffix)))

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """Return a function of a slot that returns the first `size` bytes of its suffix."""
        tokens, position_of, token_bytes = self._bytes, self.suffixes_T.item, self._token_bytes

        def read(slot: int) -> bytes:
            begin = position_of(slot) * token_bytes
            return tokens[begin : begin + size].tobytes()

        return read


def build(
    folder: Path,
    settings: Settings,
    sources: Sequence[Source],
    versions: dict[str, str],
    on_stage: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Make a datastore of these sources. A folder that holds just these is left as it is.

    Sorting needs about 60 bytes of memory for each token.

    Args:
        on_stage: called with a description of each stage.

    Raises:
        InputError: the folder holds something else, or a file cannot be written. Or a source has no tokens, or
            tokens that are not in the vocabulary, or all together have 2^32 tokens or more.
    """
    sources = list({source.sha256: source for source in sources}.values())
    if (held := _held(folder)) is not None:
        same = {source.sha256 for source in sources} == {source["sha256"] for source in held.sources}
        if same and held.tokenizer == settings.tokenizer:
            return held
        names = ", ".join(source["name"] for source in held.sources)
        raise InputError(f"{folder} holds a datastore of {names} ({held.tokenizer_name}): use another folder")
    dtype, parts, described = _dtype_for(settings.vocab_size), list[Array](), list[dict[str, Any]]()
    for source in sources:
        on_stage(f"reading {source.name}")
        part_T = _join(_check(source, settings.vocab_size), dtype)
        documents = int((part_T == _separator_of(dtype)).sum())
        described.append(
            {"name": source.name, "sha256": source.sha256, "documents": documents, "tokens": len(part_T) - documents}
        )
        parts.append(part_T)
    tokens_T = np.concatenate(parts, dtype=dtype)
    if len(tokens_T) > MAX_TOKENS:
        raise InputError(f"{len(tokens_T):,} tokens are too many for one datastore: give it fewer than 2^32")
    on_stage(f"sorting {len(tokens_T):,} tokens")
    suffixes_T = order_of(tokens_T, DEPTH)
    largest = int(tokens_T[tokens_T != _separator_of(dtype)].max())
    manifest = Manifest(settings.tokenizer, settings.tokenizer_name, largest, tuple(described), len(tokens_T), versions)
    _write(folder, manifest, tokens_T, suffixes_T)
    return manifest


def _held(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None if the folder does not exist or is empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    return Manifest.read(folder)


def _write(folder: Path, manifest: Manifest, tokens_T: Array, suffixes_T: Array) -> None:
    """Write the files into a temporary folder, and rename it."""
    content = {"format": FORMAT, "version": VERSION, "sorted_to": DEPTH, **asdict(manifest)}
    made = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with write_errors(folder):
        try:
            made.mkdir(parents=True)
            np.save(made / "tokens.npy", tokens_T)
            np.save(made / "suffixes.npy", suffixes_T)
            (made / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
            if folder.exists():
                folder.rmdir()  # it is empty
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _check(source: Source, vocab_size: int) -> Iterator[Sequence[int]]:
    """Yield the documents of a source. Raise InputError if it has none, or a token is not in the vocabulary."""
    is_empty = True
    for document in source.read():
        if len(document):
            is_empty = False
            low, high = min(document), max(document)
            if low < 0 or high >= vocab_size:
                raise InputError(
                    f"{source.name} has token {low if low < 0 else high}, the vocabulary is 0..{vocab_size - 1}"
                )
            yield document
    if is_empty:
        raise InputError(f"{source.name} has no tokens: there is nothing to look up in it")


def _dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return two bytes for a token if all ids and the separator fit into them, otherwise four."""
    return np.dtype(">u2" if vocab_size < 1 << 16 else ">u4")


def _separator_of(dtype: np.dtype[Any]) -> int:
    """Return the value that ends each document: the largest number of the dtype, which no token has."""
    return int(np.iinfo(dtype).max)


def _join(documents: Iterable[Sequence[int]], dtype: np.dtype[Any]) -> Array:
    """Return documents end to end, [T], each with its separator."""
    end = np.array([_separator_of(dtype)], dtype)
    parts = [part for document in documents for part in (np.asarray(document, dtype), end)]
    # np.concatenate alone would change the order of bytes to the machine's
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)


def _damage_error(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is damaged ({reason}): delete the folder and build it again {BUILD_IT}")


def order_of(tokens_T: Array, depth: int) -> Array:
    """Return the positions of all suffixes, sorted by at least their first `depth` tokens, uint32 [T].

    Prefix doubling (Manber and Myers 1993), where only suffixes that are still tied are sorted again
    (Larsson and Sadakane 1999). Suffixes that agree in their first `depth` tokens stay in the order of their
    positions. A look-up of `depth` tokens cannot tell, and a text that repeats itself takes no more rounds than
    another. It takes fewer than 2^32 tokens and needs about 60 bytes of memory for each.
    """
    T = len(tokens_T)
    bits = max(1, int(tokens_T.max()).bit_length())
    known = min(T, 64 // bits)  # tokens that the keys compare
    key = np.zeros(T, np.uint64)
    for k in range(known):
        key <<= np.uint64(bits)
        key[: T - k] |= tokens_T[k:]
    order = np.argsort(key, kind="stable").astype(np.uint32)
    key = key[order]
    slot = np.arange(T, dtype=np.uint32)  # slots of `order` whose suffixes are tied; at first all
    rank = np.zeros(T + 1, np.uint32)  # by position: 1 + the first slot of its tie; 0 past the end
    while True:
        is_first = np.concatenate([[True], key[1:] != key[:-1]])
        rank[order[slot]] = np.maximum.accumulate(np.where(is_first, slot, 0)) + 1
        slot = slot[~(is_first & np.append(is_first[1:], True))]
        if not len(slot) or known >= depth:
            return order.astype("<u4", copy=False)
        position = order[slot]
        key = rank[position].astype(np.uint64) << np.uint64(32)
        key |= rank[np.minimum(position.astype(np.int64) + known, T)]
        sorting = np.argsort(key, kind="stable")
        order[slot] = position[sorting]
        key = key[sorting]
        known *= 2
