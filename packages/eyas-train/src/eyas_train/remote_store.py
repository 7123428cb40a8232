"""Features at a URL that fsspec opens (s3://, gs://, https://, ...): a training fetches the parts that it reads.

    first          manifest.json and examples.safetensors
    for a shard    its beginning, with the checksums of its examples
    for a step     the rows of its examples, all at the same time, while the step before is computed

A batch has examples from all over the store, as examples are in the shards at random. So a training fetches
rows of examples, not whole shards. They are kept in a temporary folder up to a number of bytes; the ones that were read longest ago
go first. Each is compared with its CRC-32 whenever it has been fetched.
"""

from __future__ import annotations

import io
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import torch
from safetensors.torch import load
from torch import Tensor

from eyas.errors import InputError
from eyas.files import write_errors
from eyas.text.sources import RemoteFile, as_file, package_errors, read_errors
from eyas_train._tensors import Header, parse_header
from eyas_train.store import FeatureStore

MAX_HEADER_BYTES = 1 << 16  # read of a shard's beginning; its header has about a hundred bytes for each layer

Key = tuple[int, int]  # number of an example, layer
Part = tuple[int, int, int]  # bytes of a shard: its number, their begin and end


def open_store(place: str, max_bytes: int) -> FeatureStore:
    """Return the features in a folder or at a URL.

    Args:
        max_bytes: how much of the features at a URL is kept here.

    Raises:
        InputError: the manifest or the examples are missing, damaged or out of reach.
        OptionError: the package that reads such a URL is missing.
    """
    source = as_file(place)
    return RemoteStore(source, max_bytes) if isinstance(source, RemoteFile) else FeatureStore(source)


class RemoteStore(FeatureStore):
    """Features at a URL, of which some are kept here. They must be whole: no shard may be missing."""

    repair = "copy it there again"

    def __init__(self, source: RemoteFile, max_bytes: int) -> None:
        """Raise InputError if the manifest or the examples are missing or damaged, or shards are not made yet."""
        from fsspec.core import url_to_fs

        super().__init__(cast(Path, source))  # it only names files in it
        if any(shard.sha256 is None for shard in self.manifest.shards):
            raise InputError(f"{source} was copied before `eyas features` had ended: let it end, and copy all files")
        self.source, self.max_bytes = source, max_bytes
        with read_errors(source), package_errors(source):
            self.files, self.root = url_to_fs(source.url)
        self.kept: dict[Key, int] = {}  # bytes of what is here; read longest ago first
        self._headers: dict[int, Header] = {}
        self._place = Path(mkdtemp(prefix="eyas-features-"))
        weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future[dict[Key, bytes]] | None = None

    def _load(self, path: Any) -> dict[str, Tensor]:
        return load(path.read_bytes())

    def fault(self, shard: int) -> str:
        """Return an empty string: a shard elsewhere is checked when it is first read."""
        return ""

    def expect(self, numbers: Sequence[int], layers: Sequence[int]) -> None:
        """Wait for the running download, then start to download the named examples that are not cached yet."""
        keys = [(number, layer) for number in numbers for layer in layers]
        if all(key in self.kept for key in keys):
            return
        self._collect()
        for key in keys:
            if key in self.kept:
                self.kept[key] = self.kept.pop(key)  # now the last to go
        if missing := [key for key in keys if key not in self.kept]:
            self._ahead = self._thread.submit(self._fetch, missing)

    def _rows(self, number: int, layer: int) -> list[Tensor]:
        key = (number, layer)
        if key not in self.kept:
            self._collect()
        if key not in self.kept:
            self._keep(self._fetch([key]))
        self.kept[key] = self.kept.pop(key)
        content, begin, rows = bytearray(self._path_of(key).read_bytes()), 0, list[Tensor]()
        for tensor in self.settings.tensors(layer):
            count = self.lengths[number] * tensor.width
            rows.append(torch.frombuffer(content, dtype=tensor.dtype, count=count, offset=begin).view(-1, tensor.width))
            begin += rows[-1].nbytes
        return rows

    def _path_of(self, key: Key) -> Path:
        return self._place / f"{key[0]}.{key[1]}"

    def _collect(self) -> None:
        """Wait for the rows that are being fetched, and keep them."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._keep(ahead.result())

    def _keep(self, contents: Mapping[Key, bytes]) -> None:
        for key, content in contents.items():
            with write_errors(self._path_of(key)):
                self._path_of(key).write_bytes(content)
            self.kept[key] = len(content)
            self._checked.discard(key)
        size = sum(self.kept.values())
        while size > self.max_bytes and len(self.kept) > 1:
            oldest = next(iter(self.kept))
            size -= self.kept.pop(oldest)
            self._path_of(oldest).unlink()

    def _fetch(self, keys: Sequence[Key]) -> dict[Key, bytes]:
        """Return these rows of examples. Raise InputError if they cannot be read."""
        self._fetch_headers(sorted({self._place_of[number][0] for number, _ in keys} - self._headers.keys()))
        contents = iter(self._read([part for key in keys for part in self._parts(key)]))
        return {key: b"".join(next(contents) for _ in self.settings.tensors(key[1])) for key in keys}

    def _fetch_headers(self, shards: Sequence[int]) -> None:
        columns, planned = len(self.settings.layers), self.manifest.shards
        parts = [(shard, 0, MAX_HEADER_BYTES + 8 * columns * planned[shard].examples) for shard in shards]
        for shard, content in zip(shards, self._read(parts, may_end=True), strict=True):
            header = parse_header(io.BytesIO(content), self.path(shard))
            if fault := self._header_fault(shard, header, header.end):
                raise InputError(f"{fault}; {self.repair}")
            begin, end = header.tensors["crc32"]
            checksums = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.int64)
            self._checksums[shard] = checksums.view(-1, columns)
            self._headers[shard] = header

    def _parts(self, key: Key) -> Iterator[Part]:
        """Yield where an example's rows are, one part for each tensor of the layer."""
        number, layer = key
        shard, row, _ = self._place_of[number]
        for tensor in self.settings.tensors(layer):
            begin = self._headers[shard].tensors[tensor.name][0] + row * tensor.token_bytes
            yield shard, begin, begin + self.lengths[number] * tensor.token_bytes

    def _read(self, parts: Sequence[Part], may_end: bool = False) -> list[bytes]:
        """Return parts of shards, read at the same time where the file system can do that.

        Args:
            may_end: whether a shard may end before the end of a part.
        """
        names = [f"{self.root.rstrip('/')}/{self.manifest.shards[shard].file}" for shard, _, _ in parts]
        begins, ends = [begin for _, begin, _ in parts], [end for _, _, end in parts]
        with read_errors(self.source):
            contents = self.files.cat_ranges(names, begins, ends, on_error="return")
        for (shard, begin, end), content in zip(parts, contents, strict=True):
            path, size = self.path(shard), end - begin
            with read_errors(path):
                if isinstance(content, BaseException):
                    raise content
            if len(content) > size or (len(content) < size and not may_end):
                raise InputError(
                    f"{path}: {len(content):,} bytes came where {size:,} had been asked for: the file is cut, or its "
                    f"server sends no parts of files; {self.repair}"
                )
        return list(contents)
