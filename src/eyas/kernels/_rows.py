"""Weights as files and tensors hold them: rows, given by their addresses.

The kernels pack such rows by all threads, straight from where they lie. So matrices that are joined,
permuted or interleaved need no copy, and a file that is mapped into memory no float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref, c_int64, c_uint8, c_void_p
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eyas.kernels._build import library
from eyas.kernels._records import KINDS, address, floats

__all__ = ["Rows", "block_type", "joined"]

PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # types of rows by their numbers in GGUF files
WIDTH = {0: 4, 1: 2, 30: 2}  # bytes of a plain number


@dataclass(frozen=True)
class BlockType:
    """A type of quantised weights in GGUF files, and how the kernels store it (cpu/pack.h)."""

    size: int  # weights of a block
    bytes: int  # of a block in the file
    packed_bytes: int
    kind: str
    scales: int  # as in cpu/records.h
    zero: int
    codes: Tensor | None  # uint8 [16]: integers of nibbles


def block_type(number: int) -> BlockType | None:
    """Return the type of blocks with this number; None for plain and for unknown types."""
    return _block_type(library(), number)


@cache
def _block_type(kernels: CDLL, number: int) -> BlockType | None:
    found, codes = tuple(c_int64() for _ in range(6)), (c_uint8 * 16)()
    known = kernels.eyas_block_type(c_int64(number), *map(byref, found), codes)
    if not known:
        return None
    size, size_bytes, packed, kind, scales, zero = (one.value for one in found)
    table = torch.tensor(list(codes), dtype=torch.uint8, device="cpu") if known == 2 else None
    return BlockType(size, size_bytes, packed, KINDS[kind], scales, zero, table)


@dataclass(frozen=True)
class Rows:
    """Rows of weights of one type.

    Attributes:
        type: the number of their type in GGUF files.
        address_O: int64; where each row begins, 0 for a row of zeros.
        inputs: I, the weights of a row.
        owner: the object that keeps their memory.
        column_I: where the weights of `read` lie in a row that is sorted in another way; None: in their order.
    """

    type: int
    address_O: Tensor
    inputs: int
    owner: Any = field(repr=False)
    column_I: Tensor | None = None

    @classmethod
    def of(cls, weight_OI: Tensor) -> Rows:
        """Return the rows of a tensor on the CPU."""
        weight_OI = weight_OI.detach()
        weight_OI = (weight_OI if weight_OI.dtype in PLAIN else weight_OI.float()).contiguous()
        outputs, inputs = weight_OI.shape
        begin = address(weight_OI, weight_OI.dtype) or 0
        return cls.at(begin, PLAIN[weight_OI.dtype], outputs, inputs, weight_OI)

    @classmethod
    def at(cls, begin: int, kind: int, outputs: int, inputs: int, owner: Any) -> Rows:
        """Return rows that lie one after the other from an address on."""
        block = block_type(kind)
        width = inputs * WIDTH[kind] if block is None else inputs // block.size * block.bytes
        return cls(kind, begin + width * torch.arange(outputs, dtype=torch.long, device="cpu"), inputs, owner)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.address_O), self.inputs

    def __len__(self) -> int:
        return len(self.address_O)

    def take(self, index_O: Tensor | slice) -> Rows:
        """Return some of the rows, in another order or repeated."""
        return replace(self, address_O=self.address_O[index_O].contiguous())

    def read(self) -> Tensor:
        """Return the weights [O, I] in float32."""
        weight_OI = floats(*self.shape)
        library().eyas_read_rows(
            c_int64(self.type), c_void_p(address(self.address_O, torch.long)), *map(c_int64, self.shape),
            c_void_p(address(weight_OI)), c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return weight_OI if self.column_I is None else weight_OI[:, self.column_I]

    def sample(self, step: int) -> Tensor:
        """Return every step-th weight, row after row."""
        place_N = torch.arange(0, len(self) * self.inputs, step, device="cpu")
        row_N, index_N = torch.unique(place_N // self.inputs, return_inverse=True)
        return self.take(row_N).read()[index_N, place_N % self.inputs]


def joined(parts: Sequence[Rows]) -> Rows | None:
    """Return the rows of all parts; None where they have several types."""
    if len({part.type for part in parts}) > 1:
        return None
    addresses = torch.cat([part.address_O for part in parts])
    return replace(parts[0], address_O=addresses, owner=[part.owner for part in parts])
