"""Packs the weights of linear layers in the kernels' formats."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.formats import EXACT, WeightFormat
from eyas.kernels._build import library
from eyas.kernels._linear import Matrix, has_avx512_bf16, has_dots, lanes, panel
from eyas.kernels._memory import huge_pages
from eyas.kernels._records import address
from eyas.kernels._rows import PLAIN, Rows, block_type, joined

__all__ = ["Memory", "draft_format", "pack", "pack_gated", "packed_bytes"]

GROUP_SIZE = 32  # inputs of int4 that share a scale
LOSSLESS = 3e-7  # relative error of int8 weights that comes from the rounding of their scale alone
LIMBS = {"int16": 2, "int8": 1}  # 8-bit limbs of quantised activations (cpu/tiles.h); otherwise three
Memory = Callable[[int], Tensor]


def draft_format(draft_weights: str) -> WeightFormat:
    """Return the format of draft nets: int8 or int4 weights, 16-bit activations. It affects drafts, never the
    output text."""
    return WeightFormat("int4" if draft_weights == "int4" else "int8", "int16")


def pack(
    weight_OI: Tensor | Rows,
    bias_O: Tensor | None = None,
    weight_format: WeightFormat = EXACT,
    memory: Memory = huge_pages,
) -> Matrix:
    """Pack a matrix in the narrowest kind that holds it without loss, or in the one that
    `weight_format` rounds to.

    Args:
        memory: makes room for a number of bytes. Where it `is_filled`, they are there already.
    """
    rows = weight_OI if isinstance(weight_OI, Rows) else Rows.of(weight_OI)
    if rows.column_I is not None:
        rows = Rows.of(rows.read())
    outputs, inputs = rows.shape
    width = panel()
    padded = outputs + -outputs % width
    form = _form_of(rows, weight_format)
    data = memory(padded * form.row_bytes).view(padded // width, width * form.row_bytes)
    bias_O = None if bias_O is None else F.pad(bias_O.detach().float(), (0, padded - outputs)).contiguous()
    scale_O = None
    if form.kind in ("int8", "int8_dot"):
        scale_O = memory(4 * padded).view(torch.float32)
    matrix = Matrix(form.kind, data, scale_O, bias_O, inputs, outputs, form.limbs, form.scales, form.zero, form.codes)
    address_O = F.pad(rows.address_O, (0, padded - outputs))
    if not getattr(memory, "is_filled", False):
        library().eyas_pack(
            byref(matrix.record), c_int64(rows.type), c_void_p(address(address_O, torch.long)), c_void_p(data.data_ptr()),
            c_void_p(address(scale_O)), c_int64(torch.get_num_threads()),
        )  # fmt: skip
    return matrix


def packed_bytes(rows: Rows, weight_format: WeightFormat) -> int:
    """Return the bytes of a matrix when it is packed."""
    return (len(rows) + -len(rows) % panel()) * _form_of(rows, weight_format).row_bytes


class Form(NamedTuple):
    """How a matrix is stored."""

    kind: str
    row_bytes: int  # of an output
    limbs: int = 3
    scales: int = 0
    zero: int = 0
    codes: Tensor | None = None


def _form_of(rows: Rows, weight_format: WeightFormat) -> Form:
    """Return the form of a matrix: the format's own, or for exact weights the narrowest form without loss."""
    inputs, weights = rows.inputs, weight_format.weights
    limbs = LIMBS.get(weight_format.activations, 3)
    exact, block = weights == "exact", block_type(rows.type)
    if exact and block is not None and has_dots():
        row_bytes = inputs // block.size * block.packed_bytes
        return Form(block.kind, row_bytes, limbs, block.scales, block.zero, block.codes)
    if weights == "int4" and not inputs % GROUP_SIZE and has_dots():
        return Form("nibbles", inputs // 2 + inputs // GROUP_SIZE * 2, limbs, scales=1, zero=8)
    plain = block is None
    if weights in ("int8", "int4") or (exact and plain and _holds(_is_int8, rows)):
        if inputs % lanes() or not has_dots():
            return Form("int8", inputs)
        return Form("int8_dot", inputs, limbs, zero=library().eyas_int8_zero())
    is_bfloat16 = rows.type == PLAIN[torch.bfloat16] or (exact and plain and _holds(_is_bfloat16, rows))
    if not inputs % 2 and (weights == "bfloat16" or (exact and is_bfloat16)):
        rounds_inputs = weight_format.activations == "bfloat16" and not inputs % lanes() and has_avx512_bf16()
        return Form("bfloat16", 2 * inputs, 1 if rounds_inputs else 3)
    if exact and rows.type == PLAIN[torch.float16] and has_dots():
        return Form("float16", 2 * inputs)
    return Form("float32", 4 * inputs)


def _holds(test: Callable[[Tensor], bool], rows: Rows) -> bool:
    """Return whether all rows pass a test; nearly always the first ones tell that they do not."""
    first, rest = rows.take(slice(8)), (rows.take(slice(n, n + 1024)) for n in range(8, len(rows), 1024))
    return test(first.read()) and all(test(part.read()) for part in rest)


def _is_bfloat16(weight_OI: Tensor) -> bool:
    return torch.equal(weight_OI.bfloat16().float(), weight_OI)


def _is_int8(weight_OI: Tensor) -> bool:
    """Return whether scaled integers are the weights, up to the rounding of their scale."""
    scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    error_OI = ((weight_OI / scale_O1).round() * scale_O1 - weight_OI).abs()
    return bool((error_OI <= LOSSLESS * weight_OI.abs()).all())


def pack_gated(
    gate_OI: Tensor | Rows, up_OI: Tensor | Rows, bias_O: tuple[Tensor, Tensor] | None = None,
    weight_format: WeightFormat = EXACT, memory: Memory = huge_pages,
) -> Matrix:  # fmt: skip
    """Pack both matrices of a gated MLP as one: every panel holds `lanes()` gates, then their ups. O:
    a multiple of 16."""
    gate, up = (part if isinstance(part, Rows) else Rows.of(part) for part in (gate_OI, up_OI))
    index_O = torch.arange(2 * len(gate), device="cpu").view(2, -1, lanes()).transpose(0, 1).flatten()
    bias = None if bias_O is None else torch.cat(bias_O)[index_O]
    both = joined((gate, up))
    assert both is not None, "rows of one matrix have one type"
    return pack(both.take(index_O), bias, weight_format, memory)
