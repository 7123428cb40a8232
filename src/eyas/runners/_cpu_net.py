"""A copy of a net whose layers are computed by the CPU kernels, with copies of their weights in the
kernels' format.

The packed copies do not learn, so a net in training is never converted.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.kernels import Pass
from eyas.nn import CacheContents, DecoderLayer, DraftCache, LayerShape, RMSNorm

__all__ = ["CpuLayer", "KernelLinear", "with_cpu_kernels"]

Net = TypeVar("Net", bound=nn.Module)


class CpuLayer:
    """A decoder layer computed by the CPU kernels, with a packed copy of its weights."""

    def __init__(
        self, layer: DecoderLayer, weight_format: kernels.WeightFormat, threads: kernels.ThreadCount = None
    ) -> None:
        attention, mlp, shape = layer.attention, layer.mlp, layer.attention.shape
        qkv = (attention.q, attention.k, attention.v)
        bias = torch.cat([m.bias for m in qkv]) if shape.qkv_bias else None
        pack = partial(kernels.pack, weight_format=weight_format)
        packed = kernels.Layer(
            qkv=pack(torch.cat([m.weight for m in qkv]), bias),
            o=pack(attention.o.weight),
            gate_up=kernels.pack_gated(mlp.gate.weight, mlp.up.weight, weight_format=weight_format),
            down=pack(mlp.down.weight),
            norm=None,
            mlp_norm=layer.mlp_norm.weight.detach().clone(),
        )
        self.shape = kernels.LayerSizes(
            hidden=shape.hidden_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            inner=shape.intermediate_size,
            eps=shape.rms_eps,
            scale=shape.head_dim**-0.5,
        )
        self.layer = kernels.Layers(self.shape, [packed], threads)
        self.frequency_h = attention.frequency(torch.device("cpu"))
        self._cosine = self._sine = kernels.floats(0, shape.head_dim)

    @staticmethod
    def suits(shape: LayerShape) -> bool:
        """Return whether the kernels support these sizes."""
        odd = shape.qk_norm or shape.hidden_size % 32 or shape.intermediate_size % 32
        return shape.head_dim in kernels.HEAD_DIMS and not odd

    def __call__(
        self, input_RNX: Tensor, residual_RND: Tensor, position_RN: Tensor, cache: DraftCache
    ) -> Tensor | None:
        """Return the layer's output; None for a cache that the kernels cannot use."""
        contents = cache.cpu_kernel_view()
        if contents is None:
            return None
        x_RND = residual_RND.clone(memory_format=torch.contiguous_format)
        self.layer.draft(input_RNX.contiguous(), x_RND, self.attention_pass(contents, position_RN, cache.width))
        return x_RND

    def attention_pass(self, contents: CacheContents, position_RN: Tensor, width: int) -> Pass:
        """Return the kernels' input for attention, and for storing keys and values.

        Args:
            width: upper bound of the slots in use, with the new nodes' slots.
        """
        visible_RNT = contents.visible_RNT.contiguous()
        cosine, sine = self.tables(width)
        return Pass(
            contents.length_R.contiguous(), position_RN.contiguous(), visible_RNT, visible_RNT, cosine, sine,
            contents.store, contents.rows,
        )  # fmt: skip

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [P, h] of at least this many positions."""
        if positions > len(self._cosine):
            angle = torch.arange(max(256, 2 * positions), device="cpu")[:, None] * self.frequency_h.repeat(2)
            self._cosine, self._sine = angle.cos(), angle.sin()
        return self._cosine, self._sine


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
    """Return a copy of a float32 net on the CPU that computes with the kernels.

    Args:
        weight_format: the format of its linear layers' weights. Rounding a draft net changes its drafts, never
            the output text.
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
