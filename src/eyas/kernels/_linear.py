"""Linear layers: packing weights in the kernels' formats, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.formats import EXACT, ThreadCount, WeightFormat
from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._memory import huge_pages
from eyas.kernels._records import KINDS, address, floats
from eyas.kernels._rows import PLAIN, Rows, block_type

__all__ = [
    "EXACT", "Matrix", "Memory", "ThreadCount", "WeightFormat", "count", "draft_format", "has_amx", "has_avx512_bf16", "has_dots",
    "head", "lanes", "layout", "linear", "pack", "pack_gated", "packed_bytes", "panel", "rms_norm",
]  # fmt: skip

GROUP_SIZE = 32  # inputs of int4 that share a scale
HALF, BFLOAT = 0, 1  # scales of a group, as in cpu/records.h
SCALE_BYTES = ((2, 0), (2, 0), (4, 0), (1, 2), (2, 4))  # by scales: of a group, and of 256 inputs
FIRST_ROWS, CHUNK_ROWS = 8, 1024  # of a matrix, which are tried before the others; those tried at a time
LOSSLESS = 3e-7  # relative error of int8 weights that comes from the rounding of their scale alone
Memory = Callable[[int], Tensor]
LIMBS = {"int16": 2, "int8": 1}  # 8-bit limbs of quantised activations (cpu/tiles.h); otherwise three


def draft_format(draft_weights: str) -> WeightFormat:
    """Return the format of draft nets: int8 or int4 weights, 16-bit activations. It affects drafts, never the
    output text."""
    return WeightFormat("int4" if draft_weights == "int4" else "int8", "int16")


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights in panels of P = `panel()` outputs, padded with zero outputs.

    data: uint8 [O / P, bytes of a panel], laid out as cpu/tiles.h says.
    """

    kind: str
    data: Tensor
    scale_O: Tensor | None
    bias_O: Tensor | None
    inputs: int
    outputs: int  # without the padding
    limbs: int = 3  # limbs of an activation for integer dot products; its parts for bfloat16
    scales: int = HALF  # of groups, as in cpu/records.h
    zero: int = 0
    codes: Tensor | None = None

    @property
    def padded(self) -> int:
        """Outputs with the padding."""
        return self.data.shape[0] * panel()

    @property
    def bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.data.numel()

    @cached_property
    def record(self) -> _records.Matrix:
        pointers = address(self.data, torch.uint8), address(self.scale_O), address(self.bias_O)
        numbers = KINDS.index(self.kind), self.limbs, self.inputs, self.padded, self.scales, self.zero
        return _records.Matrix(*pointers, *numbers, self.data.shape[1], address(self.codes, torch.uint8))


# --- packing -------------------------------------------------------------------------------------


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
    scales: int = HALF
    zero: int = 0
    codes: Tensor | None = None


def _form_of(rows: Rows, weight_format: WeightFormat) -> Form:
    """Return the narrowest form that holds the rows without loss, or the one that the format rounds to."""
    inputs, weights = rows.inputs, weight_format.weights
    limbs = LIMBS.get(weight_format.activations, 3)
    exact, block = weights == "exact", block_type(rows.type)
    if exact and block is not None and has_dots():
        own, shared = SCALE_BYTES[block.scales]
        group = 16 if block.kind == "bytes16" else GROUP_SIZE
        integers = inputs // 2 if block.kind in ("nibbles", "nibbles_min", "codes") else inputs
        row_bytes = integers + inputs // group * own + inputs // 256 * shared
        return Form(block.kind, row_bytes, limbs, block.scales, block.zero, block.codes)
    if weights == "int4" and not inputs % GROUP_SIZE and has_dots():
        return Form("nibbles", inputs // 2 + inputs // GROUP_SIZE * 2, limbs, BFLOAT, 8)
    plain = block is None
    if weights in ("int8", "int4") or (exact and plain and _holds(_is_int8, rows)):
        if inputs % lanes() or not has_dots():
            return Form("int8", inputs)
        return Form("int8_dot", inputs, limbs, zero=int(library().eyas_int8_zero()))
    is_bfloat16 = rows.type == PLAIN[torch.bfloat16] or (exact and plain and _holds(_is_bfloat16, rows))
    if not inputs % 2 and (weights == "bfloat16" or (exact and is_bfloat16)):
        rounds_inputs = weight_format.activations == "bfloat16" and not inputs % lanes() and has_avx512_bf16()
        return Form("bfloat16", 2 * inputs, 1 if rounds_inputs else 3)
    if exact and rows.type == PLAIN[torch.float16] and has_dots():
        return Form("float16", 2 * inputs)
    return Form("float32", 4 * inputs)


def _holds(test: Callable[[Tensor], bool], rows: Rows) -> bool:
    """Return whether all rows pass a test; nearly always the first ones tell that they do not."""
    begins = [0, *range(FIRST_ROWS, len(rows), CHUNK_ROWS)]
    return all(test(rows.take(slice(a, b)).read()) for a, b in zip(begins, [*begins[1:], len(rows)], strict=True))


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
    return pack(gate.joined(up).take(index_O), bias, weight_format, memory)


# --- the processor -------------------------------------------------------------------------------


def lanes() -> int:
    """Return the number of floats in a vector of the kernels: 16, 8 or 4."""
    return int(library().eyas_lanes())


def panel() -> int:
    """Return the number of outputs of a panel of weights."""
    return 2 * lanes()


def layout() -> tuple[int, int, int]:
    """Return the numbers that decide the layout of panels."""
    return lanes(), _dot_inputs(), int(library().eyas_int8_zero())


def has_dots() -> bool:
    """Return whether int8 and int4 weights are multiplied by integer dot products here."""
    return _dot_inputs() > 0


def _dot_inputs() -> int:
    """Return the number of inputs that such a dot product sums, 4 or 2; 0 where there are none."""
    return int(library().eyas_dot_inputs())


def has_avx512_bf16() -> bool:
    """Return whether the processor has AVX-512 BF16, which sums products of bfloat16."""
    return bool(library().eyas_has_avx512_bf16())


def has_amx() -> bool:
    """Return whether the processor has AMX, and the system lets this process use it: it multiplies
    int8 and bfloat16 weights then."""
    return bool(library().eyas_has_amx())


def count(threads: ThreadCount) -> int:
    """Return the number of threads now."""
    return threads() if callable(threads) else threads or torch.get_num_threads()


# --- computing -----------------------------------------------------------------------------------


def linear(matrix: Matrix, x: Tensor, threads: ThreadCount = None) -> Tensor:
    """Return the product [..., O] with inputs x [..., I], float32."""
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    y_MO = floats(x_MI.shape[0], matrix.padded)
    library().eyas_linear(
        byref(matrix.record),
        c_void_p(address(x_MI)),
        c_int64(len(x_MI)),
        c_void_p(address(y_MO)),
        c_int64(count(threads)),
    )
    return y_MO[:, : matrix.outputs].view(*x.shape[:-1], matrix.outputs)


def head(
    x_MD: Tensor, norm_D: Tensor, eps: float, matrix: Matrix | None, normed_MD: Tensor, threads: ThreadCount = None
) -> Tensor | None:
    """Write the RMS norm of x to `normed`, whose rows may be apart; return its logits [M, O] if
    there is a matrix."""
    logits_MO = None if matrix is None else floats(len(x_MD), matrix.padded)
    library().eyas_head(
        c_void_p(address(x_MD)),
        *map(c_int64, x_MD.shape),
        c_void_p(address(norm_D)),
        c_float(eps),
        c_void_p(address(normed_MD)),
        c_int64(normed_MD.stride(0)),
        None if matrix is None else byref(matrix.record),
        c_void_p(address(logits_MO)),
        c_int64(count(threads)),
    )
    return None if matrix is None or logits_MO is None else logits_MO[:, : matrix.outputs]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, threads: ThreadCount = 1) -> Tensor:
    """Return the RMS norm of x [..., D]; D: a multiple of 16."""
    x_MD = x.reshape(-1, x.shape[-1]).contiguous()
    y_MD = torch.empty_like(x_MD)
    head(x_MD, weight_D, eps, None, y_MD, threads)
    return y_MD.view(x.shape)
