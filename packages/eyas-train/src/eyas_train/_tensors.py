"""Safetensors files that hold their own checksum.

Written here, because the library's writer copies everything and hides the system's reason of a
failure (a full disk); read by the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import parse_json, write_atomically
from eyas.text.sources import File
from eyas_lab.folders import remove_leftovers

__all__ = ["Header", "byte_view", "file_digest", "parse_header", "read_header", "tensors_digest", "write_tensors"]

MAX_HEADER_BYTES = 1 << 27
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def byte_view(value: Tensor) -> memoryview:
    """Return the bytes of a tensor; not copied when it is contiguous and on the CPU."""
    return memoryview(value.contiguous().view(-1).view(torch.uint8).numpy().data)


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return SHA-256 of all bytes, in this order."""
    digest = hashlib.sha256()
    for value in tensors.values():
        digest.update(byte_view(value))
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata has the SHA-256 of the data. Raise OSError when it cannot be written.

    The widest dtypes must come first, so that all tensors are aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, "sha256": tensors_digest(tensors)}}
    begin = 0
    for name, value in tensors.items():
        end = begin + value.numel() * value.element_size()
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    header_bytes = dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    remove_leftovers(path.parent, f"{path.name}.*")
    with write_atomically(path) as stream:
        stream.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for value in tensors.values():
            stream.write(byte_view(value))


class Header(NamedTuple):
    """The beginning of a file."""

    metadata: dict[str, Any]
    begin: int  # where the data begins
    end: int  # how many bytes the file should have
    tensors: dict[str, tuple[int, int]]  # first byte and end of each, in the file


def read_header(path: Path) -> Header:
    """Return a file's header. Raise InputError if there is none."""
    try:
        with open(path, "rb") as stream:
            return parse_header(stream, path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(stream: BinaryIO, path: File) -> Header:
    """Return the header of a file that is open. Raise InputError, which names the path, if there is none."""
    try:
        size = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(size) if size < MAX_HEADER_BYTES else b"")
        begin = 8 + size
        metadata = dict(header.pop("__metadata__"))
        metadata["sha256"]  # every file of `write_tensors` has one
        tensors = {
            name: (begin + entry["data_offsets"][0], begin + entry["data_offsets"][1]) for name, entry in header.items()
        }
        return Header(metadata, begin, max(end for _, end in tensors.values()), tensors)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: no header") from error


def file_digest(path: Path, begin: int) -> str:
    """Return SHA-256 of the file from byte `begin` on."""
    with open(path, "rb") as stream:
        stream.seek(begin)
        return hashlib.file_digest(stream, "sha256").hexdigest()
