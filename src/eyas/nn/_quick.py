"""A net as decoding runs it where there are compiled kernels: the same modules, with copies of their weights in the kernels' form.

What is copied does not learn: a net that is being trained is never made quick.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.nn._layers import DecoderLayer, FusedLayer, RMSNorm

__all__ = ["QuickLinear", "with_cpu_kernels"]

Net = TypeVar("Net", bound=nn.Module)


class QuickLinear(nn.Module):
    """A linear layer by kernels."""

    def __init__(self, linear: nn.Linear, form: kernels.WeightFormat, threads: kernels.ThreadCount) -> None:
        super().__init__()
        self.threads = threads
        self.weight, self.bias = linear.weight, linear.bias  # as they were, for who asks
        self.matrix = kernels.pack(linear.weight, linear.bias, form)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(self.matrix, x, self.threads)


@torch.no_grad()
def with_cpu_kernels(net: Net, form: kernels.WeightFormat, threads: kernels.ThreadCount = None) -> Net:
    """A copy of a float32 net on the CPU that computes by kernels.

    form: of its linear layers; a draft's may be rounded: that changes what it guesses, never what is said.
    """
    other = deepcopy(net)
    for module in list(other.modules()):
        if isinstance(module, RMSNorm) and not module.weight.numel() % 16:
            module.by_kernels = True
        if isinstance(module, DecoderLayer) and FusedLayer.suits(module.attention.shape):
            module.fused = FusedLayer(module, form, threads)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not isinstance(module, QuickLinear):
                setattr(module, name, QuickLinear(child, form, threads))
    return other
