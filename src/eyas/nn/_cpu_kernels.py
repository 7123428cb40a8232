"""A copy of a net whose layers are computed by the CPU kernels, with copies of their weights in the
kernels' format.

The packed copies do not learn, so a net in training is never converted.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.nn._layers import CpuLayer, DecoderLayer, RMSNorm

__all__ = ["KernelLinear", "with_cpu_kernels"]

Net = TypeVar("Net", bound=nn.Module)


class KernelLinear(nn.Module):
    """A linear layer computed by the CPU kernels."""

    def __init__(self, linear: nn.Linear, weight_format: kernels.WeightFormat, threads: kernels.ThreadCount) -> None:
        super().__init__()
        self.threads = threads
        self.weight, self.bias = linear.weight, linear.bias  # unpacked, for readers of the module
        self.matrix = kernels.pack(linear.weight, linear.bias, weight_format)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(self.matrix, x, self.threads)


@torch.no_grad()
def with_cpu_kernels(net: Net, weight_format: kernels.WeightFormat, threads: kernels.ThreadCount = None) -> Net:
    """A copy of a float32 net on the CPU that computes with the kernels.

    Args:
        weight_format: the format of its linear layers' weights. Rounding a draft net changes what
            it drafts, never the output text.
    """
    copy = deepcopy(net)
    for module in list(copy.modules()):
        if isinstance(module, RMSNorm) and not module.weight.numel() % 16:
            module.by_kernel = kernels.rms_norm
        if isinstance(module, DecoderLayer) and CpuLayer.suits(module.attention.shape):
            module.fused = CpuLayer(module, weight_format, threads)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not isinstance(module, KernelLinear):
                setattr(module, name, KernelLinear(child, weight_format, threads))
    return copy
