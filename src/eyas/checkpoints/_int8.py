"""Matrices in int8 with one float32 scale for each row, as the embedded model and the heads of eyas-tiny are stored: half
the bytes of 16 bits.

Kernels that draft with int8 weights round each row in the same way, so they draft with the stored numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["from_int8", "to_int8"]

SCALE = ".scale"  # tensor `x.scale` [rows] belongs to the int8 matrix `x` [rows, columns]


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices of floats to int8, with the largest absolute value of a row at 127; convert other floats to
    float32."""
    packed = {}
    for name, value in tensors.items():
        if not value.is_floating_point():
            packed[name] = value
            continue
        wide = value.float()
        if wide.ndim != 2:
            packed[name] = wide
            continue
        scale = wide.abs().amax(1).clamp(min=1e-12) / 127
        packed[name] = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def from_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with float32 matrices in place of what `to_int8` packed; all others as they are."""
    packed = {name for name, value in tensors.items() if value.dtype == torch.int8 and name + SCALE in tensors}
    scales = {name + SCALE for name in packed}
    return {
        name: value.float() * tensors[name + SCALE][:, None] if name in packed else value
        for name, value in tensors.items()
        if name not in scales
    }
