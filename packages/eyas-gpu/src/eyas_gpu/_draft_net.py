"""A copy of a draft net whose layers run by the GPU kernels: thirteen kernels a layer, where torch
launches fifty.

The copy shares the net's parameters. Matrices with one input become views of a common one
(`JoinedLinears`), or are rounded to fp8. A net in training is never converted. Not yet run on a
GPU.
Letters: R rows, N nodes, D hidden, X inputs of attention, K key-value heads, W slots, h head size.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from eyas.nn import DecoderLayer, DraftCache, RMSNorm
from eyas_gpu._fp8 import Fp8Linear
from eyas_gpu._matrices import JoinedFp8Linears, JoinedLinears
from eyas_gpu._tables import RotaryTables
from eyas_gpu.operators import add_norm, attention, join_norms, rms_norm, rotate_and_store, swiglu

__all__ = ["GpuLayer", "with_gpu_kernels"]

Net = TypeVar("Net", bound=nn.Module)
MOST_POSITIONS = 2**30  # tables grow with the text


class GpuLayer:
    """A draft net's decoder layer by GPU kernels."""

    def __init__(self, layer: DecoderLayer, fp8: bool) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.shape = attention.shape

        def matrices(*linears: nn.Linear) -> JoinedLinears | JoinedFp8Linears:
            return (
                JoinedFp8Linears(linears)
                if fp8 and JoinedFp8Linears.suits(linears)
                else JoinedLinears(linears, joined=True)
            )

        self.qkv, self.output = matrices(attention.q, attention.k, attention.v), matrices(attention.o)
        self.gate_up, self.down = matrices(mlp.gate, mlp.up), matrices(mlp.down)
        self.mlp_norm = layer.mlp_norm
        self.tables = RotaryTables(self._cosines, MOST_POSITIONS)
        self._frequency_h = attention.frequency(attention.q.weight.device)

    def _cosines(self, positions: int) -> tuple[Tensor, Tensor]:
        angle = torch.arange(positions, device=self._frequency_h.device)[:, None].float() * self._frequency_h
        return angle.cos(), angle.sin()

    def __call__(
        self, input_RNX: Tensor, residual_RND: Tensor, position_RN: Tensor, cache: DraftCache
    ) -> Tensor | None:
        """Return the layer's output [R, N, D]; None for a cache that does not show its slots."""
        if (slots := cache.gpu_kernel_view()) is None:
            return None
        N, T, h = position_RN.shape[1], slots.visible_RNT.shape[2], self.shape.head_dim
        q_RNHh = rotate_and_store(
            *self.qkv(input_RNX), *self.tables(cache.width), position_RN, slots.length_R, T - N, slots.key_RKWh, slots.value_RKWh,
            None, None, 0.0, slots.unrotated_RKWh,
        )  # fmt: skip
        seen = slice(0, cache.width)
        attended_RNHh = attention(
            q_RNHh, slots.key_RKWh[:, :, seen], slots.value_RKWh[:, :, seen], slots.length_R, slots.visible_RNT, position_RN, h**-0.5
        )  # fmt: skip
        norm, attended_RND = self.mlp_norm, self.output(attended_RNHh.flatten(2))[0]
        hidden_RND, normed_RND = add_norm(attended_RND, residual_RND, norm.weight, norm.eps)
        output_RND: Tensor = hidden_RND + self.down(swiglu(*self.gate_up(normed_RND)))[0]
        return output_RND


@torch.no_grad()
def with_gpu_kernels(net: Net, draft_weights: str) -> Net:
    """Return a copy of the net that computes with the kernels.

    Args:
        draft_weights: "auto", or "fp8": rounded, which changes drafts, never the output text.
    """
    copy, fp8 = deepcopy(net, {id(x): x for x in (*net.parameters(), *net.buffers())}), draft_weights == "fp8"
    for module in list(copy.modules()):
        if isinstance(module, RMSNorm):
            module.by_kernel, module.join_by_kernel = rms_norm, join_norms
        if isinstance(module, DecoderLayer) and not module.attention.shape.qk_norm:
            module.fused = GpuLayer(module, fp8)
        for name, child in list(module.named_children()):
            if fp8 and type(child) is nn.Linear and JoinedFp8Linears.suits([child]):
                setattr(module, name, Fp8Linear(child))
    return copy
