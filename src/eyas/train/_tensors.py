"""A safetensors file that holds its own checksum.

Written here because the library's writer copies everything and hides what the system says (a full disk); read by the library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.errors import InputError
from eyas.files import replaced

__all__ = ["digest_of", "digest_of_file", "read_header", "view_of", "write_tensors"]

NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip


def view_of(value: Tensor) -> memoryview:
    """Its bytes, not copied when it is contiguous and on the CPU."""
    return memoryview(value.contiguous().view(-1).view(torch.uint8).numpy().data)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all bytes, in this order."""
    digest = hashlib.sha256()
    for value in tensors.values():
        digest.update(view_of(value))
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Written beside its place, renamed when it is whole and on the disk; OSError when it cannot be. Widest dtypes come first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, "sha256": digest_of(tensors)}}
    begin = 0
    for name, value in tensors.items():
        end = begin + value.numel() * value.element_size()
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
        begin = end
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a killed run
        leftover.unlink(missing_ok=True)

    with replaced(path) as stream:
        stream.write(len(said).to_bytes(8, "little") + said)
        for value in tensors.values():
            stream.write(view_of(value))


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where the data begins, how many bytes the file should have); InputError when it is none."""
    try:
        with open(path, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size) if size < 1 << 27 else b"")
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: no header") from error
    return header, 8 + size, 8 + size + int(end)


def digest_of_file(path: Path, begin: int) -> str:
    """SHA-256 of what stands behind the header; `begin` as `read_header` says."""
    with open(path, "rb") as stream:
        stream.seek(begin)
        return hashlib.file_digest(stream, "sha256").hexdigest()
