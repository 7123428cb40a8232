"""Linear layers: packing weights in the kernels' formats, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.formats import EXACT, ThreadCount, WeightFormat
from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._memory import in_huge_pages
from eyas.kernels._records import address, floats

__all__ = [
    "EXACT", "Matrix", "ThreadCount", "WeightFormat", "count", "draft_format", "has_amx", "has_avx512_bf16", "has_dots",
    "head", "lanes", "linear", "pack", "pack_gated", "rms_norm",
]  # fmt: skip

GROUP_SIZE = 32  # inputs of int4 that share a scale, as in cpu/tiles.h
CLIPPING = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # scales of an int4 group that are tried, of the one without clipping
KINDS = ("float32", "bfloat16", "int8", "int8_dot", "int4")  # as in cpu/records.h
FIRST_ROWS = 8  # of a matrix, which are tried before all of it
LOSSLESS = 3e-7  # relative error of int8 weights that comes from the rounding of their scale alone
LIMBS = {"int16": 2, "int8": 1}  # 8-bit limbs of quantised activations (cpu/tiles.h); otherwise three


def draft_format(draft_weights: str) -> WeightFormat:
    """Return the format of draft nets: int8 or int4 weights, 16-bit activations. It affects drafts, never the
    output text."""
    return WeightFormat("int4" if draft_weights == "int4" else "int8", "int16")


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights in panels of P = 2 `lanes()` outputs, padded with zero outputs.

    data: [O / P, I, P] in float32 or int8; [O / P, I / 2, P, 2] in bfloat16. For machines with integer dot
        products of d inputs: int8 [O/P, I/d, P, d], and int4 as uint8 [O/P, I/32, 18P] (cpu/tiles.h).
    """

    kind: Literal["float32", "bfloat16", "int8", "int8_dot", "int4"]
    data: Tensor
    scale_O: Tensor | None
    bias_O: Tensor | None
    inputs: int
    outputs: int  # without the padding
    limbs: int = 3  # limbs of an activation for int8_dot and int4; its parts for bfloat16

    @property
    def padded(self) -> int:
        """Outputs with the padding."""
        return self.data.shape[0] * 2 * lanes()

    @property
    def bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.data.numel() * self.data.element_size()

    @cached_property
    def record(self) -> _records.Matrix:
        pointers = address(self.data, self.data.dtype), address(self.scale_O), address(self.bias_O)
        return _records.Matrix(*pointers, KINDS.index(self.kind), self.limbs, self.inputs, self.padded)


# --- packing -------------------------------------------------------------------------------------


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, weight_format: WeightFormat = EXACT) -> Matrix:
    """Pack a matrix in the narrowest kind that holds it without loss, or in the one that
    `weight_format` rounds to."""
    outputs, inputs = weight_OI.shape
    padding = -outputs % (2 * lanes())
    weight_OI = weight_OI.detach().float()
    if padding:  # even without any, torch would copy
        weight_OI = F.pad(weight_OI, (0, 0, 0, padding))
    bias_O = None if bias_O is None else F.pad(bias_O.detach().float(), (0, padding)).contiguous()
    limbs = LIMBS.get(weight_format.activations, 3)
    if weight_format.weights == "int4" and not inputs % GROUP_SIZE and has_dots():
        return Matrix("int4", _int4_panels(weight_OI), None, bias_O, inputs, outputs, limbs)
    exact = weight_format.weights == "exact"
    if weight_format.weights in ("int8", "int4") or (exact and _holds(_is_int8, weight_OI)):
        integer_OI, scale_O = _to_int8(weight_OI)
        if inputs % lanes() or not has_dots():
            return Matrix("int8", _panels(integer_OI.to(torch.int8)), scale_O.contiguous(), bias_O, inputs, outputs)
        stored_OI = (integer_OI + library().eyas_int8_zero()).to(torch.int16).to(torch.uint8)  # modulo 256
        data = _panels(stored_OI, _dot_inputs())
        return Matrix("int8_dot", data, scale_O.contiguous(), bias_O, inputs, outputs, limbs)
    if not inputs % 2 and (weight_format.weights == "bfloat16" or (exact and _holds(_is_bfloat16, weight_OI))):
        rounds_inputs = weight_format.activations == "bfloat16" and not inputs % lanes() and has_avx512_bf16()
        return Matrix(
            "bfloat16", _panels(weight_OI.bfloat16(), 2), None, bias_O, inputs, outputs, 1 if rounds_inputs else 3
        )
    return Matrix("float32", _panels(weight_OI), None, bias_O, inputs, outputs)


def _holds(test: Callable[[Tensor], bool], weight_OI: Tensor) -> bool:
    """Return whether all rows pass a test; nearly always the first ones tell that they do not."""
    return test(weight_OI[:FIRST_ROWS]) and test(weight_OI)


def _is_bfloat16(weight_OI: Tensor) -> bool:
    return torch.equal(weight_OI.bfloat16().float(), weight_OI)


def _to_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (integers from -127 to 127, the scale of each row)."""
    scale_O = weight_OI.abs().amax(1).clamp(min=1e-30) / 127
    return (weight_OI / scale_O[:, None]).round(), scale_O


def _is_int8(weight_OI: Tensor) -> bool:
    """Return whether scaled integers are the weights, up to the rounding of their scale."""
    integer_OI, scale_O = _to_int8(weight_OI)
    error_OI = (integer_OI * scale_O[:, None] - weight_OI).abs()
    return bool((error_OI <= LOSSLESS * weight_OI.abs()).all())


def pack_gated(
    gate_OI: Tensor, up_OI: Tensor, bias_O: tuple[Tensor, Tensor] | None = None, weight_format: WeightFormat = EXACT
) -> Matrix:
    """Pack both matrices of a gated MLP as one: every panel holds `lanes()` gates, then their ups. O:
    a multiple of 16."""

    def interleave(gate: Tensor, up: Tensor) -> Tensor:
        parts = [part.reshape(-1, lanes(), *part.shape[1:]) for part in (gate, up)]
        return torch.stack(parts, 1).flatten(0, 2)

    return pack(interleave(gate_OI, up_OI), None if bias_O is None else interleave(*bias_O), weight_format)


def _int4_panels(weight_OI: Tensor) -> Tensor:
    """Return uint8 [O/P, I/32, 18P] for panels of P outputs: integers from -8 to 7, plus 8, two in a byte; then
    the scales in bfloat16.

    A group's scale is the one of those in CLIPPING with the least squared error.
    """
    group_OGg = weight_OI.view(len(weight_OI), -1, GROUP_SIZE)
    panel, inputs = 2 * lanes(), _dot_inputs()
    panels, groups = len(weight_OI) // panel, group_OGg.shape[1]
    largest_OG1 = group_OGg.gather(2, group_OGg.abs().argmax(2, keepdim=True))  # signed: -8 exists, 8 does not
    least_error_OG1 = torch.full_like(largest_OG1, torch.inf)
    integer_OGg = torch.zeros_like(group_OGg)
    scale_OG1 = torch.zeros_like(largest_OG1)
    for share in CLIPPING:
        scale = (largest_OG1 / -8 * share).bfloat16().float()
        integer = (group_OGg / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
        error = (integer * scale - group_OGg).square().sum(2, keepdim=True)
        better = error < least_error_OG1
        least_error_OG1 = error.where(better, least_error_OG1)
        scale_OG1 = scale.where(better, scale_OG1)
        integer_OGg = integer.where(better, integer_OGg)
    scale_OG1 = scale_OG1.where(least_error_OG1.isfinite(), torch.nan)  # NaN stays NaN
    # panel, output, group, step, nibble, input of a dot product
    nibbles = (integer_OGg + 8).to(torch.uint8).view(panels, panel, groups, -1, 2, inputs)
    bytes_PGsOd = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    scale_PGO = scale_OG1.view(panels, panel, groups).transpose(1, 2).bfloat16().contiguous()
    return in_huge_pages(torch.cat([bytes_PGsOd.flatten(2), scale_PGO.view(torch.uint8)], dim=2))


def _panels(weight_OI: Tensor, together: int = 1) -> Tensor:
    """Return the weights as [O / P, I / together, P, together], without the last dimension where it would be 1."""
    panels = weight_OI.view(-1, 2 * lanes(), weight_OI.shape[1] // together, together).transpose(1, 2)
    return in_huge_pages(panels.squeeze(-1) if together == 1 else panels)


# --- the processor -------------------------------------------------------------------------------


def lanes() -> int:
    """Return the number of floats in a vector of the kernels: 16, 8 or 4."""
    return int(library().eyas_lanes())


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
