"""Linear layers in fp8 on GPUs that support it: half the bytes of bfloat16; reading weights
dominates the time of a draft level.

Weights are rounded to e4m3 with a scale per output, activations with a scale per row at every call.
For draft nets only: it changes drafts, never the output text.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas.core.ops import Ops
from eyas_gpu._matrices import JoinedFp8Linears

__all__ = ["TORCH", "Fp8Linear", "TorchOps", "fp8"]

Net = TypeVar("Net", bound=nn.Module)


class Fp8Linear(nn.Module):
    """A linear layer, [..., I] -> [..., O] in the dtype of its input; I and O are multiples of 16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # unrounded, for readers of the module
        self.matrix = JoinedFp8Linears([linear])

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x)[0]


@torch.no_grad()
def fp8(net: Net) -> Net:
    """Return a copy of the net with suitable linear layers in fp8; everything else is shared with it."""
    other = deepcopy(net, {id(x): x for x in (*net.parameters(), *net.buffers())})
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and JoinedFp8Linears.suits([child]):
                setattr(module, name, Fp8Linear(child))
    return other


class TorchOps(Ops):
    """The reference operations, with draft nets in fp8 on request."""

    draft_formats = ("auto", "fp8")

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        return fp8(net) if draft_weights == "fp8" else net


TORCH = TorchOps()
