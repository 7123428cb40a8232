"""Linear layers: matrices in the kernels' formats, and products with them."""

from __future__ import annotations

from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eyas.formats import ThreadCount
from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._records import KINDS, address, floats

__all__ = [
    "Matrix", "ThreadCount", "count", "has_amx", "has_avx512_bf16", "has_dots", "head", "lanes", "linear", "panel",
    "rms_norm", "scale_logits",
]  # fmt: skip


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
    scales: int = 0  # of groups, as in cpu/records.h
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


# --- the processor -------------------------------------------------------------------------------


def lanes() -> int:
    """Return the number of floats in a vector of the kernels: 16, 8 or 4."""
    return int(library().eyas_lanes())


def panel() -> int:
    """Return the number of outputs of a panel of weights."""
    return 2 * lanes()


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
    x_MD: Tensor, norm_D: Tensor, eps: float, matrix: Matrix | None, normed_MD: Tensor, threads: ThreadCount = None,
    bias_D: Tensor | None = None, centred: bool = False,
) -> Tensor | None:  # fmt: skip
    """Write the norm of x to `normed`, whose rows may be apart; return its logits [M, O] if there is a matrix.

    Args:
        centred: the norm subtracts the mean, and adds `bias` if it has one.
    """
    logits_MO = None if matrix is None else floats(len(x_MD), matrix.padded)
    library().eyas_head(
        c_void_p(address(x_MD)),
        *map(c_int64, x_MD.shape),
        c_void_p(address(norm_D)),
        c_void_p(address(bias_D)),
        c_int64(centred),
        c_float(eps),
        c_void_p(address(normed_MD)),
        c_int64(normed_MD.stride(0)),
        None if matrix is None else byref(matrix.record),
        c_void_p(address(logits_MO)),
        c_int64(count(threads)),
    )
    return None if matrix is None or logits_MO is None else logits_MO[:, : matrix.outputs]


def scale_logits(logits: Tensor, scale: float, softcap: float, threads: ThreadCount = None) -> None:
    """Multiply logits by `scale` and cap them (0: no cap), in place. Padding that `linear` leaves after each row is changed,
    too. So the bits of a row do not depend on other rows."""
    whole = torch.empty(0, dtype=torch.float32, device="cpu").set_(logits.untyped_storage())
    factors = torch.tensor([scale, softcap], dtype=torch.float32, device="cpu")
    pointers = c_void_p(address(whole)), c_int64(whole.numel()), c_void_p(address(factors))
    library().eyas_scale(*pointers, c_int64(count(threads)))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, threads: ThreadCount = 1) -> Tensor:
    """Return the RMS norm of x [..., D]; D: a multiple of 16."""
    x_MD = x.reshape(-1, x.shape[-1]).contiguous()
    y_MD = torch.empty_like(x_MD)
    head(x_MD, weight_D, eps, None, y_MD, threads)
    return y_MD.view(x.shape)
