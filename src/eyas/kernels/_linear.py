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
    "EXACT", "GUESS", "LANES", "Form", "Matrix", "Team", "adds_up_bytes", "count", "head", "linear", "pack", "pack_gated", "rms_norm",
]  # fmt: skip

PANEL, LANES = 32, 16  # as in cpu/vectors.h
KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)  # as in cpu/linear.h
HELD = 3e-7  # of a weight: rounding of its scale
DIGITS = {"exact": 3, "int16": 2, "int8": 1}  # that activations are taken apart into (cpu/tiles.h)
Team = int | Callable[[], int] | None  # threads: a number, who knows it at the moment, or torch's


@dataclass(frozen=True)
class Form:
    """In which numbers linear layers are kept and multiplied; everything between them is float32.

    weights: exact: int8 with a scale a row where they are such multiples, bfloat16 where they are such numbers, else float32; int8: rounded
        to the first of these.
    activations: what weights kept as int8 are multiplied by, where the machine adds up products of bytes (elsewhere they stay float32).
        exact: as exact as float32. int16, int8: of each token's vector, whole multiples of its largest number's 1/32,639 or 1/127, which
        costs two thirds or one third of the arithmetic.
    """

    weights: Literal["exact", "int8"] = "exact"
    activations: Literal["exact", "int16", "int8"] = "exact"

    @property
    def exact(self) -> bool:
        """Whether it is the model's own arithmetic, to float32's roundings."""
        return self.weights == self.activations == "exact"


EXACT, GUESS = Form(), Form("int8", "int16")  # guess: of what drafts


@dataclass(frozen=True)
class Matrix:
    """A linear layer's weights, in panels of 32 outputs; outputs are filled up with zeros.

    data: [O / 32, I, 32] in float32 or int8; [O / 32, I / 2, 32, 2] in bfloat16; [O / 32, I / 4, 32, 4] in uint8, which is int8 + 128 for
    machines that add up products of bytes (cpu/tiles.h).
    """

    data: Tensor
    scale_O: Tensor | None
    bias_O: Tensor | None
    outputs: int  # without the filling
    digits: int = DIGITS["exact"]  # of what uint8 is multiplied by

    @cached_property
    def inputs(self) -> int:
        return self.data[0].numel() // PANEL

    @property
    def padded(self) -> int:
        return self.data.shape[0] * PANEL

    @property
    def bytes(self) -> int:
        """What a pass reads."""
        return self.data.numel() * self.data.element_size()

    @cached_property
    def record(self) -> _records.Matrix:
        kind = KINDS.index(self.data.dtype)
        given = (self.data, self.scale_O, self.bias_O)
        return _records.Matrix(*map(_records.at, given), kind, self.digits, self.inputs, self.padded)


def pack(weight_OI: Tensor, bias_O: Tensor | None = None, form: Form = EXACT) -> Matrix:
    """A matrix in the narrowest form that holds it."""
    outputs = weight_OI.shape[0]
    fill = -outputs % PANEL
    weight_OI = torch.nn.functional.pad(weight_OI.detach().float(), (0, 0, 0, fill))
    bias_O = None if bias_O is None else torch.nn.functional.pad(bias_O.detach().float(), (0, fill)).contiguous()
    scale_O = weight_OI.abs().amax(1).clamp(min=1e-30) / 127
    whole_OI = (weight_OI / scale_O[:, None]).round()
    if form.weights == "int8" or bool(((whole_OI * scale_O[:, None] - weight_OI).abs() <= HELD * weight_OI.abs()).all()):
        quads = not weight_OI.shape[1] % LANES and adds_up_bytes()
        data = _panels((whole_OI + 128).to(torch.uint8), 4) if quads else _panels(whole_OI.to(torch.int8))
        return Matrix(data, scale_O.contiguous(), bias_O, outputs, DIGITS[form.activations])
    half_OI = weight_OI.bfloat16()
    narrow = not weight_OI.shape[1] % 2 and torch.equal(half_OI.float(), weight_OI)
    return Matrix(_panels(half_OI, 2) if narrow else _panels(weight_OI), None, bias_O, outputs)


def pack_gated(gate_OI: Tensor, up_OI: Tensor, bias_O: tuple[Tensor, Tensor] | None = None, form: Form = EXACT) -> Matrix:
    """Both matrices of a gated unit in one: every panel holds 16 gates, then the 16 ups beside them. O: a multiple of 16."""

    def mixed(gate: Tensor, up: Tensor) -> Tensor:
        parts = [part.reshape(-1, LANES, *part.shape[1:]) for part in (gate, up)]
        return torch.stack(parts, 1).flatten(0, 2)

    return pack(mixed(gate_OI, up_OI), None if bias_O is None else mixed(*bias_O), form)


def adds_up_bytes() -> bool:
    """Whether this machine adds up products of bytes (AVX-512 VNNI): then int8 weights are kept for that."""
    return bool(library().eyas_quads())


def _panels(weight_OI: Tensor, together: int = 1) -> Tensor:
    """[O / 32, I / together, 32, together], without the last dimension where it would be 1."""
    panels = weight_OI.view(-1, PANEL, weight_OI.shape[1] // together, together).transpose(1, 2)
    return (panels.squeeze(-1) if together == 1 else panels).contiguous()


def linear(matrix: Matrix, x: Tensor, threads: Team = None) -> Tensor:
    """x [..., I] -> [..., O], float32. threads: torch's number by default, as everywhere here."""
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    y_MO = torch.empty(x_MI.shape[0], matrix.padded)
    library().eyas_linear(byref(matrix.record), c_void_p(x_MI.data_ptr()), c_int64(len(x_MI)), c_void_p(y_MO.data_ptr()), _threads(threads))
    return y_MO[:, : matrix.outputs].view(*x.shape[:-1], matrix.outputs)


def _threads(asked: Team) -> c_int64:
    return c_int64(count(asked))


def count(asked: Team) -> int:
    return asked() if callable(asked) else asked or torch.get_num_threads()


def head(
    x_MD: Tensor, norm_D: Tensor, eps: float, matrix: Matrix | None, normed_MD: Tensor, threads: Team = None
) -> Tensor | None:  # fmt: skip
    """The RMS norm of x, into `normed` (its rows may stand apart); and the logits [M, O] of it, if there is a matrix."""
    logits_MO = None if matrix is None else torch.empty(len(x_MD), matrix.padded)
    library().eyas_head(
        c_void_p(x_MD.data_ptr()), c_int64(len(x_MD)), c_int64(x_MD.shape[1]), c_void_p(norm_D.data_ptr()), c_float(eps),
        c_void_p(normed_MD.data_ptr()), c_int64(normed_MD.stride(0)), None if matrix is None else byref(matrix.record),
        c_void_p(_records.at(logits_MO)), _threads(threads),
    )  # fmt: skip
    return None if matrix is None or logits_MO is None else logits_MO[:, : matrix.outputs]


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, threads: Team = 1) -> Tensor:
    """The RMS norm of x [..., D]; D: a multiple of 16."""
    x_MD = x.reshape(-1, x.shape[-1]).contiguous()
    y_MD = torch.empty_like(x_MD)
    head(x_MD, weight_D, eps, None, y_MD, threads)
    return y_MD.view(x.shape)
