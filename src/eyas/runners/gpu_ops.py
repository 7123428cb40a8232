"""The operations of a cycle by the GPU kernels: the same numbers as `core.ops.Ops`, which is the reference. Not yet run on a GPU."""

from __future__ import annotations

from torch import nn

from eyas.core.ops import Ops
from eyas.nn import with_gpu_kernels

__all__ = ["GpuOps"]


class GpuOps(Ops):
    """Draft nets by kernels."""

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        return with_gpu_kernels(net, draft_weights)
