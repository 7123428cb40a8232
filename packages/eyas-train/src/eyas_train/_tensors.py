"""Safetensors files that hold their own checksum, and features in eight bits.

Written here, because the library's writer copies everything and hides the system's reason of a
failure (a full disk); read by the library.

Eight bits are float8_e4m3fn, and a scale for each token and layer. A scale is a power of two, so that the number that is
read back, in bfloat16, is exactly the number that was stored times the scale. A feature is off by at most 1/16 of itself,
or by 2^-17 of the largest one of its token and layer where that is more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import parse_json, write_atomically
from eyas.text.sources import File
from eyas_lab.folders import remove_leftovers

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
DTYPE_NAMES = {
    **dict(zip(DTYPES.values(), ("BF16", "F16", "F32", "F8_E4M3"), strict=True)),
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
        end = begin + value.nbytes
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
        header = parse_json(stream.read(size) if size < 1 << 27 else b"")
        begin, metadata = 8 + size, dict(header.pop("__metadata__"))
        metadata["sha256"]  # every file of `write_tensors` has one
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        tensors = {name: (begin + first, begin + end) for name, (first, end) in offsets.items()}
        return Header(metadata, begin, max(end for _, end in tensors.values()), tensors)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: no header") from error


def stored(features_ND: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in which features are stored: themselves in this dtype; for eight bits first their scales
    [N, 1], which are not finite where a feature is not.
    """
    if dtype.itemsize > 1:
        return [features_ND.to(dtype)]
    wide_ND = features_ND.float()
    largest_N1 = wide_ND.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)  # a smaller token becomes zeros, or nearly
    scale_N1 = (largest_N1.log2().floor() - 7).exp2().to(torch.bfloat16)  # the largest becomes 128 to 256, of 448
    return [scale_N1, (wide_ND / scale_N1).to(dtype)]


def restored(tensors: Sequence[Tensor]) -> Tensor:
    """Return the features [N, D] of `stored`; of eight bits in bfloat16."""
    if len(tensors) == 1:
        return tensors[0]
    scale_N1, small_ND = tensors
    return small_ND.to(torch.bfloat16) * scale_N1
