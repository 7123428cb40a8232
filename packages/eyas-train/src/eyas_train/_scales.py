"""Features in eight bits: float8_e4m3fn, and a scale for each token and layer.

A scale is a power of two, so that the number that is read back, in bfloat16, is exactly the number that was
stored times the scale. A feature is off by at most 1/16 of itself, or by 2^-17 of the largest one of its token
and layer where that is more. This module knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["restored", "stored"]

SMALLEST = 2.0**-100  # a token whose features are all smaller is stored as zeros, or nearly


def stored(features_ND: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors in which features are stored: themselves in this dtype; for eight bits first their scales
    [N, 1], which are not finite where a feature is not.
    """
    if dtype.itemsize > 1:
        return [features_ND.to(dtype)]
    wide_ND = features_ND.float()
    largest_N1 = wide_ND.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    scale_N1 = (largest_N1.log2().floor() - 7).exp2().to(torch.bfloat16)  # the largest becomes 128 to 256, of 448
    return [scale_N1, (wide_ND / scale_N1).to(dtype)]


def restored(tensors: Sequence[Tensor]) -> Tensor:
    """Return the features [N, D] of `stored`; of eight bits in bfloat16."""
    if len(tensors) == 1:
        return tensors[0]
    scale_N1, small_ND = tensors
    return small_ND.to(torch.bfloat16) * scale_N1
