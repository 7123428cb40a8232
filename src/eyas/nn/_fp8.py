"""Linear layers in fp8 on GPUs that support it: half the bytes of bfloat16, which bound the time of a draft's levels.

Weights are rounded to e4m3 with a scale per output, activations with a scale per row at every call. For draft nets only: it
changes what is drafted, never the output text.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

__all__ = ["FP8_CAPABILITY", "Fp8Linear", "fp8"]

FP8_CAPABILITY = (8, 9)  # the least CUDA compute capability
KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max

Net = TypeVar("Net", bound=nn.Module)


class Fp8Linear(nn.Module):
    """A linear layer, [..., I] -> [..., O] in the dtype of its input; I and O are multiples of 16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # unrounded, for readers of the module
        self.scale_O1 = (linear.weight.detach().float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
        self.weight_OI = (linear.weight.detach().float() / self.scale_O1).to(KIND)

    @staticmethod
    def suits(linear: nn.Linear) -> bool:
        """Whether both sizes are multiples of 16."""
        return not linear.in_features % 16 and not linear.out_features % 16

    def forward(self, x: Tensor) -> Tensor:
        x_MI = x.reshape(-1, x.shape[-1])
        scale_M1 = (x_MI.float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
        y_MO = F.scaled_mm(
            (x_MI.float() / scale_M1).to(KIND), self.weight_OI.t(), scale_M1, ScalingType.RowWise, self.scale_O1.t(), ScalingType.RowWise,
            output_dtype=torch.bfloat16,
        ).to(x.dtype)  # fmt: skip
        y_MO = y_MO if self.bias is None else y_MO + self.bias
        return y_MO.view(*x.shape[:-1], -1)


@torch.no_grad()
def fp8(net: Net) -> Net:
    """A copy of the net with suitable linear layers in fp8; everything else is shared with it."""
    other = deepcopy(net, {id(x): x for x in (*net.parameters(), *net.buffers())})
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and Fp8Linear.suits(child):
                setattr(module, name, Fp8Linear(child))
    return other
