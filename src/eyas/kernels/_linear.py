"""Linear layers: weights as they are stored, in the form that kernels read, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library

__all__ = [
    "EXACT",
    "LANES",
    "Matrix",
    "ThreadCount",
    "WeightFormat",
    "count",
    "draft_format",
    "has_amx",
    "has_avx512_bf16",
    "has_vnni",
    "head",
    "linear",
    "pack",
    "pack_gated",
    "rms_norm",
]  # fmt: skip

PANEL, LANES = 32, 16  # as in cpu/vectors.h
GROUP = 32  # inputs of int4 that share scales, as in cpu/tiles.h
SCALES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # that are tried; the largest numbers of a group are cut by the smaller ones
KINDS = ("float32", "bfloat16", "int8", "quads", "int4")  # as in cpu/records.h
HELD = 3e-7  # of a weight: rounding of its scale
DIGITS = {"int16": 2, "int8": 1}  # that activations are taken apart into (cpu/tiles.h); else three
ThreadCount = int | Callable[[], int] | None  # threads: a number, who knows it at the moment, or torch's


@dataclass(frozen=True)
class WeightFormat:
    """In which numbers linear layers are kept and multiplied; everything between them is float32.

    weights: exact: int8 with a scale an output where they are such multiples, bfloat16 where they are such numbers, else float32; int8,
        bfloat16: rounded to one of these; int4: rounded, with a scale for every 32 inputs of an output (where there are no 32s: int8).
    activations: what weights are multiplied by, where the machine adds up such products (elsewhere it stays float32). exact: as exact as
        float32. Of weights kept as bfloat16: bfloat16, one third to one half of the arithmetic. Of those kept as int8 or int4: int16,
        int8, which are, of each token's vector, whole multiples of its largest number's 1/32,639 or 1/127, and cost two thirds or one
        third of the arithmetic.
    """

    weights: Literal["exact", "bfloat16", "int8", "int4"] = "exact"
    activations: Literal["exact", "bfloat16", "int16", "int8"] = "exact"

    @property
    def exact(self) -> bool:
        """Whether it is the model's own arithmetic, to float32's roundings."""
        return self.weights == self.activations == "exact"


EXACT = WeightFormat()


def draft_format(draft_weights: str) -> WeightFormat:
    """Of what drafts, which changes no text: rounded to int8 at least, with two digits, which no guess was seen to depend on."""
    return WeightFormat("int4" if draft_weights == "int4" else "int8", "int16")


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights, in panels of 32 outputs; outputs are filled up with zeros.

    data: [O / 32, I, 32] in float32 or int8; [O / 32, I / 2, 32, 2] in bfloat16; for machines that add up products of bytes quads, uint8
    [O / 32, I / 4, 32, 4], which are int8 + 128, and int4, uint8 [O / 32, I / 32, 576] (cpu/tiles.h).
    """

    kind: Literal["float32", "bfloat16", "int8", "quads", "int4"]
    data: Tensor
    scale_O: Tensor | None
    bias_O: Tensor | None
    inputs: int
    outputs: int  # without the filling
    digits: int = 3  # that activations are taken apart into for quads and int4, or parts for bfloat16

    @property
    def padded(self) -> int:
        return self.data.shape[0] * PANEL

    @property
    def bytes(self) -> int:
        """What a pass reads."""
        return self.data.numel() * self.data.element_size()

    @cached_property
    def record(self) -> _records.Matrix:
        kind = KINDS.index(self.kind)
        given = (self.data, self.scale_O, self.bias_O)
        return _records.Matrix(*map(_records.at, given), kind, self.digits, self.inputs, self.padded)


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, form: WeightFormat = EXACT) -> Matrix:
    """A matrix in the narrowest form that holds it, or in the one that it is to be rounded to."""
    outputs, inputs = weight_OI.shape
    fill = -outputs % PANEL
    weight_OI = torch.nn.functional.pad(weight_OI.detach().float(), (0, 0, 0, fill))
    bias_O = None if bias_O is None else torch.nn.functional.pad(bias_O.detach().float(), (0, fill)).contiguous()
    digits = DIGITS.get(form.activations, 3)
    if form.weights == "int4" and not inputs % GROUP and has_vnni():
        return Matrix("int4", _fours(weight_OI), None, bias_O, inputs, outputs, digits)
    scale_O = weight_OI.abs().amax(1).clamp(min=1e-30) / 127
    whole_OI = (weight_OI / scale_O[:, None]).round()
    if form.weights in ("int8", "int4") or (
        form.weights == "exact" and bool(((whole_OI * scale_O[:, None] - weight_OI).abs() <= HELD * weight_OI.abs()).all())
    ):
        if inputs % LANES or not has_vnni():
            return Matrix("int8", _panels(whole_OI.to(torch.int8)), scale_O.contiguous(), bias_O, inputs, outputs)
        data = _panels((whole_OI + 128).to(torch.uint8), 4)
        return Matrix("quads", data, scale_O.contiguous(), bias_O, inputs, outputs, digits)
    half_OI = weight_OI.bfloat16()
    if not inputs % 2 and (form.weights == "bfloat16" or torch.equal(half_OI.float(), weight_OI)):
        rounded = form.activations == "bfloat16" and not inputs % LANES and has_avx512_bf16()
        return Matrix("bfloat16", _panels(half_OI, 2), None, bias_O, inputs, outputs, 1 if rounded else 3)
    return Matrix("float32", _panels(weight_OI), None, bias_O, inputs, outputs)


def pack_gated(gate_OI: Tensor, up_OI: Tensor, bias_O: tuple[Tensor, Tensor] | None = None, form: WeightFormat = EXACT) -> Matrix:
    """Both matrices of a gated unit in one: every panel holds 16 gates, then the 16 ups beside them. O: a multiple of 16."""

    def mixed(gate: Tensor, up: Tensor) -> Tensor:
        parts = [part.reshape(-1, LANES, *part.shape[1:]) for part in (gate, up)]
        return torch.stack(parts, 1).flatten(0, 2)

    return pack(mixed(gate_OI, up_OI), None if bias_O is None else mixed(*bias_O), form)


def _fours(weight_OI: Tensor) -> Tensor:
    """uint8 [O / 32, I / 32, 576]: whole numbers from -8 to 7, plus 8, two in a byte; then the scales in bfloat16.

    A group's scale is the one of SCALES times its largest number's that loses least of it, in squares.
    """
    group_OGg = weight_OI.view(len(weight_OI), -1, GROUP)
    panels, groups = len(weight_OI) // PANEL, group_OGg.shape[1]
    largest_OG1 = group_OGg.gather(2, group_OGg.abs().argmax(2, keepdim=True))  # with its sign: -8 is there, 8 is not
    best_OG1, whole_OGg = torch.full_like(largest_OG1, torch.inf), torch.zeros_like(group_OGg)
    scale_OG1 = torch.zeros_like(largest_OG1)
    for share in SCALES:
        scale = (largest_OG1 / -8 * share).bfloat16().float()
        whole = (group_OGg / torch.where(scale == 0, 1.0, scale)).round().clamp(-8, 7)
        lost = (whole * scale - group_OGg).square().sum(2, keepdim=True)
        better = lost < best_OG1
        best_OG1, scale_OG1, whole_OGg = lost.where(better, best_OG1), scale.where(better, scale_OG1), whole.where(better, whole_OGg)
    scale_OG1 = scale_OG1.where(best_OG1.isfinite(), torch.nan)  # what is no number stays none
    quads = (whole_OGg + 8).to(torch.uint8).view(panels, PANEL, groups, 4, 2, 4)  # panel, output, group, pair, half, input
    bytes_PGpO4 = (quads[..., 0, :] | quads[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
    scale_PGO = scale_OG1.view(panels, PANEL, groups).transpose(1, 2).bfloat16().contiguous()
    return torch.cat([bytes_PGpO4.flatten(2), scale_PGO.view(torch.uint8)], dim=2).contiguous()


def has_vnni() -> bool:
    """Whether this machine adds up products of bytes (AVX-512 VNNI): then int8 weights are kept for that."""
    return bool(library().eyas_quads())


def has_avx512_bf16() -> bool:
    """Whether it adds up products of bfloat16 (AVX-512 BF16)."""
    return bool(library().eyas_halves())


def has_amx() -> bool:
    """Whether it has matrix units (AMX), which this process may use: then int8 and bfloat16 weights are multiplied there."""
    return bool(library().eyas_units())


def _panels(weight_OI: Tensor, together: int = 1) -> Tensor:
    """[O / 32, I / together, 32, together], without the last dimension where it would be 1."""
    panels = weight_OI.view(-1, PANEL, weight_OI.shape[1] // together, together).transpose(1, 2)
    return (panels.squeeze(-1) if together == 1 else panels).contiguous()


def linear(matrix: Matrix, x: Tensor, threads: ThreadCount = None) -> Tensor:
    """x [..., I] -> [..., O], float32. threads: torch's number by default, as everywhere here."""
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    y_MO = torch.empty(x_MI.shape[0], matrix.padded)
    library().eyas_linear(byref(matrix.record), c_void_p(x_MI.data_ptr()), c_int64(len(x_MI)), c_void_p(y_MO.data_ptr()), _threads(threads))
    return y_MO[:, : matrix.outputs].view(*x.shape[:-1], matrix.outputs)


def _threads(asked: ThreadCount) -> c_int64:
    return c_int64(count(asked))


def count(asked: ThreadCount) -> int:
    return asked() if callable(asked) else asked or torch.get_num_threads()


def head(
    x_MD: Tensor, norm_D: Tensor, eps: float, matrix: Matrix | None, normed_MD: Tensor, threads: ThreadCount = None
) -> Tensor | None:  # fmt: skip
    """The RMS norm of x, into `normed` (its rows may stand apart); and the logits [M, O] of it, if there is a matrix."""
    logits_MO = None if matrix is None else torch.empty(len(x_MD), matrix.padded)
    library().eyas_head(
        c_void_p(x_MD.data_ptr()), c_int64(len(x_MD)), c_int64(x_MD.shape[1]), c_void_p(norm_D.data_ptr()), c_float(eps),
        c_void_p(normed_MD.data_ptr()), c_int64(normed_MD.stride(0)), None if matrix is None else byref(matrix.record),
        c_void_p(_records.at(logits_MO)), _threads(threads),
    )  # fmt: skip
    return None if matrix is None or logits_MO is None else logits_MO[:, : matrix.outputs]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, threads: ThreadCount = 1) -> Tensor:
    """The RMS norm of x [..., D]; D: a multiple of 16."""
    x_MD = x.reshape(-1, x.shape[-1]).contiguous()
    y_MD = torch.empty_like(x_MD)
    head(x_MD, weight_D, eps, None, y_MD, threads)
    return y_MD.view(x.shape)
