"""Linear layers that read the same input, multiplied as one matrix.

Letters: D inputs, X outputs of all of them, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from eyas_gpu.operators import quantise

__all__ = ["JoinedFp8Linears", "JoinedLinears"]

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class JoinedLinears:
    """Linear layers that read the same input.

    Args:
        joined: their weights become views of one matrix, which is multiplied at once.
    """

    def __init__(self, linears: Sequence[nn.Linear], joined: bool) -> None:
        self.linears, self.sizes = linears, [linear.out_features for linear in linears]
        self.weight_XD = _join([linear.weight for linear in linears]) if joined else None
        has_bias = linears[0].bias is not None
        self.bias_X = _join([linear.bias for linear in linears]) if joined and has_bias else None

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.weight_XD is None:
            return tuple(F.linear(x, linear.weight, linear.bias) for linear in self.linears)
        return torch.split(F.linear(x, self.weight_XD, self.bias_X), self.sizes, -1)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the rows of all; the parameters become views of it."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(joined, [len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joined


class JoinedFp8Linears:
    """`JoinedLinears` with weights in fp8; each output has its scale, each row of the input gets
    one in every call. D is a multiple of 16."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        weight_XD = torch.cat([linear.weight.detach().float() for linear in linears])
        has_bias = linears[0].bias is not None
        self.bias_X = torch.cat([linear.bias.detach() for linear in linears]) if has_bias else None
        self.scale_X1 = (weight_XD.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
        self.weight_XD = (weight_XD / self.scale_X1).to(E4M3)

    @staticmethod
    def suits(linears: Sequence[nn.Linear]) -> bool:
        """Return whether all sizes are multiples of 16."""
        return not any(linear.in_features % 16 or linear.out_features % 16 for linear in linears)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        x_MD, scale_M1 = quantise(x)
        y_MX = F.scaled_mm(
            x_MD,
            self.weight_XD.t(),
            scale_M1,
            ScalingType.RowWise,
            self.scale_X1.t(),
            ScalingType.RowWise,
            output_dtype=torch.bfloat16,
        ).to(x.dtype)
        y_MX = y_MX if self.bias_X is None else y_MX + self.bias_X
        return torch.split(y_MX.view(*x.shape[:-1], -1), self.sizes, -1)
