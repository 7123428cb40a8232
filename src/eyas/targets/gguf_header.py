"""The head of a file in GGUF format: its settings, and where its tensors lie.

The package `gguf` makes an array of every string. Llama 3 has 128,000 tokens and 280,000 merges, so that takes half a minute
where this reader takes a second. Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Header", "read_header"]

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAGIC = b"GGUF"
TOKENS = "tokenizer.ggml.tokens"
MOST_TOKENS = 1_000_000
ALIGNMENT = 32  # of tensors, if the file names no other


class Stored(NamedTuple):
    """A tensor of the file.

    Attributes:
        kind: ggml's number of its type.
        shape: its sizes, in torch's order.
        offset: of its first byte in the file.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Header:
    """Attributes:
    values: settings by their names.
    tensors: in the order of the file.
    parts: the bytes of each setting, its name included.
    version: of the format.
    """

    values: dict[str, Any]
    tensors: list[Stored]
    parts: dict[str, bytes]
    version: int

    def write_settings(self, path: Path) -> None:
        """Write a small file with the same settings, but without arrays of strings. Its tensors have the same names, and
        one number each. transformers takes the length of TOKENS for the vocabulary's where it knows no other; one long
        text keeps it from a warning."""
        kept = [part for name, part in self.parts.items() if not _is_strings(self.values[name])]
        kept.append(_string(TOKENS) + struct.pack("<I", STRING) + _string(MOST_TOKENS * "x"))
        tensors = b"".join(_string(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0) for tensor in self.tensors)
        head = MAGIC + struct.pack("<IQQ", self.version, len(self.tensors), len(kept)) + b"".join(kept) + tensors
        alignment = self.values.get("general.alignment", ALIGNMENT)
        path.write_bytes(head + bytes(-len(head) % alignment + alignment))


def read_header(path: Path) -> Header:
    """Read settings and places of tensors.

    Raises:
        ValueError: it is not a GGUF file, or of a version or byte order that is not read, or its end is missing.
        struct.error, IndexError, UnicodeDecodeError: the file is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).header(path.name)


@cache
def _blocks() -> dict[int, tuple[int, int]]:
    """Return the numbers and the bytes of a block, by the type's number."""
    from gguf import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def _end(tensor: Stored) -> int:
    """Return the place after a tensor's bytes, or the tensor's beginning if the package gguf does not know its type."""
    numbers, width = _blocks().get(tensor.kind, (1, 0))
    return tensor.offset + prod(tensor.shape) // numbers * width


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self, name: str) -> Header:
        magic, self.at = self.data[:4], 4
        version = self.number("I")
        if magic != MAGIC or version not in (2, 3):
            raise ValueError(f"{name} is not a GGUF file of version 2 or 3 (little endian)")
        tensors, settings = self.number("Q"), self.number("Q")
        values, parts = dict[str, Any](), dict[str, bytes]()
        for _ in range(settings):
            begin, key = self.at, self.string()
            values[key] = self.value(self.number("I"))
            parts[key] = self.data[begin : self.at]
        stored = [self.tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", ALIGNMENT)
        begin = -(-self.at // alignment) * alignment
        placed = [tensor._replace(offset=begin + tensor.offset) for tensor in stored]
        if cut := next((tensor.name for tensor in placed if _end(tensor) > len(self.data)), None):
            raise ValueError(f"{name} ends before its tensor {cut}: the file is cut off")
        return Header(values, placed, parts, version)

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        length = self.number("Q")
        begin = self.at
        self.at += length
        if self.at > len(self.data):
            raise IndexError("the file ends within a string")
        return self.data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        inner, length = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            values = struct.unpack_from(f"<{length}{NUMBERS[inner]}", self.data, self.at)
            self.at += struct.calcsize(f"<{length}{NUMBERS[inner]}")
            return list(values)
        return [self.value(inner) for _ in range(length)]

    def tensor(self) -> Stored:
        name, dimensions = self.string(), self.number("I")
        sizes = [self.number("Q") for _ in range(dimensions)]
        return Stored(name, self.number("I"), tuple(reversed(sizes)), self.number("Q"))
