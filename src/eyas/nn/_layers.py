"""The building blocks of LLaMA layers for draft nets.

RoPE is computed in float32 from integer positions, so it is exact at any length and in any dtype of
the net.
Letters: R rows, N nodes or tokens, M tokens of a packed sequence, D hidden size, H heads, K
key-value heads, h head size, W slots of the cache. This module knows no method and no target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.errors import CheckpointError

__all__ = [
    "Attention", "CacheContents", "DecoderLayer", "DraftCache", "DraftSlots", "KeysValues", "LayerShape", "RMSNorm",
    "SwiGLU", "grouped_attention", "join_normed", "rope", "rope_factor", "rope_frequencies",
]  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False  # norms over each head of queries and keys (Qwen3)


KeysValues = tuple[Tensor, Tensor]  # keys and values


class CacheContents(NamedTuple):
    """A draft net's cache as the CPU kernels see it."""

    length_R: Tensor  # int64; slots in use before the next nodes
    visible_RNT: Tensor  # bool; which of the T nodes after them each next node attends to
    store: Tensor  # [2 x layers, B, K, slots, h]: keys, values
    rows: Sequence[int]  # the R rows, in the store


class DraftSlots(NamedTuple):
    """A draft net's cache as the GPU kernels see it."""

    length_R: Tensor  # int64; slots in use before the next nodes
    # bool; which of the T nodes after them each next node attends to; the next nodes are the last
    # of the T
    visible_RNT: Tensor
    key_RKWh: Tensor
    value_RKWh: Tensor
    unrotated_RKWh: Tensor | None  # keys before RoPE, if the draft has a window


class DraftCache(Protocol):
    """The interface of a cache for the keys and values of a draft net."""

    @property
    def mask_R1NW(self) -> Tensor:
        """bool: the slots that the next nodes attend to."""
        ...

    @property
    def width(self) -> int:
        """The number of leading slots that the next nodes may attend to."""
        ...

    def cpu_kernel_view(self) -> CacheContents | None:
        """Return the cache's tensors for the CPU kernels, which store keys and values themselves; None for
        a cache that they cannot use."""
        ...

    def gpu_kernel_view(self) -> DraftSlots | None:
        """Return the cache's tensors for the GPU kernels; None for a cache that they cannot use."""
        ...

    def store(self, key_RKNh: Tensor, value_RKNh: Tensor, position_RN: Tensor, frequency_h: Tensor) -> KeysValues:
        """Store keys, not yet rotated, and values. Returns all visible ones, rotated, [R, K, W, h] each."""
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean in float32 (Zhang and Sennrich 2019)."""

    by_kernel: Callable[[Tensor, Tensor, float], Tensor] | None = None  # (x, weight, eps) -> the norm
    # (a, b, weight of a's norm, weight of b's, eps) -> the norms of a and b side by side
    join_by_kernel: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        if self.by_kernel is not None:
            return self.by_kernel(x, self.weight, self.eps)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def join_normed(a_norm: RMSNorm, a: Tensor, b_norm: RMSNorm, b: Tensor) -> Tensor:
    if a_norm.join_by_kernel is not None and a.shape == b.shape:
        return a_norm.join_by_kernel(a, b, a_norm.weight, b_norm.weight, a_norm.eps)
    return torch.cat([a_norm(a), b_norm(b)], dim=-1)


_ROPE_KINDS = ("linear", "llama3", "yarn")  # scalings that a head may have; transformers computes them


def rope_frequencies(shape: LayerShape, device: torch.device | None = None) -> Tensor:
    """Return the radians per position, float32 [h/2], with the slower ones of `rope_scaling`."""
    if shape.rope_scaling is not None:
        return _scaled_rope(shape, device)[0]
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequency: Tensor = shape.rope_theta**-exponent
    return frequency


def rope_factor(shape: LayerShape) -> float:
    """Return by how much RoPE lengthens queries and keys: YaRN's attention factor (Peng et al. 2023), else 1."""
    return 1.0 if shape.rope_scaling is None else float(_scaled_rope(shape)[1])


def _scaled_rope(shape: LayerShape, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Return transformers' frequencies, and its factor of sines and cosines."""
    scaling = dict(shape.rope_scaling or {})
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind)
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"rope_scaling {dict(shape.rope_scaling or {})} of the draft head is not supported; known: {', '.join(_ROPE_KINDS)}"
        )
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=int(scaling.get("original_max_position_embeddings", 1) * scaling["factor"]),
        rope_parameters={**scaling, "rope_type": kind, "rope_theta": shape.rope_theta},
    )
    frequency, factor = ROPE_INIT_FUNCTIONS[kind](config, device)
    return frequency.float(), factor


def rope(x_RNHh: Tensor, position_RN: Tensor, frequency_h: Tensor) -> Tensor:
    """Rotate the two halves of every head by position * frequency (Su et al. 2021, in LLaMA's
    layout of halves)."""
    angle = position_RN[..., None, None].float() * frequency_h
    cos, sin = angle.cos(), angle.sin()
    a, b = x_RNHh.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_RNHh.dtype)


def grouped_attention(
    q_RHNh: Tensor, k_RKWh: Tensor, v_RKWh: Tensor, mask_R1NW: Tensor, scale: float | None = None
) -> Tensor:  # fmt: skip
    """Return the attention of H = K x G query heads to K heads of keys and values, [R, H, N, h], without copying
    these.

    The G heads of a group become further queries of their key-value head:

        queries [R, K x G, N, h]  ->  [R, K, G x N, h]        mask [R, 1, N, W]  ->  [R, 1, G x N, W]

    The mask is bool, or added to the scores. scaled_dot_product_attention computes the sums.
    """
    (R, H, N, _), (K, W) = q_RHNh.shape, k_RKWh.shape[1:3]
    if H == K:
        return F.scaled_dot_product_attention(q_RHNh, k_RKWh, v_RKWh, attn_mask=mask_R1NW, scale=scale)
    mask_R1XW = mask_R1NW.expand(-1, H // K, -1, -1).reshape(mask_R1NW.shape[0], 1, H // K * N, W)
    out_RKXh = F.scaled_dot_product_attention(
        q_RHNh.reshape(R, K, H // K * N, -1), k_RKWh, v_RKWh, attn_mask=mask_R1XW, scale=scale
    )
    return out_RKXh.reshape(R, H, N, -1)


class Attention(nn.Module):
    """Grouped-query attention with RoPE.

    Args:
        in_size: the inputs' size where it is not the hidden size, because they are concatenated
            (EAGLE-3).
    """

    def __init__(self, shape: LayerShape, in_size: int | None = None) -> None:
        super().__init__()
        self.shape, size = shape, in_size or shape.hidden_size
        self.q = nn.Linear(size, shape.num_heads * shape.head_dim, bias=shape.qkv_bias)
        self.k = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v = nn.Linear(size, shape.num_kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, shape.rms_eps) for _ in range(2))
        self._frequency: Tensor | None = None

    def frequency(self, device: torch.device) -> Tensor:
        """Return the RoPE frequencies, float32: no parameter or buffer, so that no cast of the module
        changes them."""
        if self._frequency is None or self._frequency.device != device:
            self._frequency = rope_frequencies(self.shape, device)
        return self._frequency

    def query(self, x: Tensor, position: Tensor) -> Tensor:
        """Return the rotated queries [..., H, h] of inputs [..., in_size]."""
        q = self.q(x).unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        return rope(self.q_norm(q).to(q.dtype) if self.shape.qk_norm else q, position, self.frequency(x.device))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys, not yet rotated, and values [..., K, h] of inputs [..., in_size]."""
        k, v = self.k(x), self.v(x)
        k, v = (x.unflatten(-1, (self.shape.num_kv_heads, self.shape.head_dim)) for x in (k, v))
        return self.k_norm(k).to(k.dtype) if self.shape.qk_norm else k, v

    def store(self, x_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> tuple[Tensor, Tensor]:
        """Store keys and values in the cache. Returns the visible ones, [R, K, W, h] each."""
        return cache.store(*self.key_value(x_RND), position_RN, self.frequency(x_RND.device))

    def forward(self, x_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """Return the attention of N inputs to the cache, their own slots included, as its mask allows."""
        q_RHNh = self.query(x_RND, position_RN).transpose(1, 2)
        k_RKWh, v_RKWh = self.store(x_RND, position_RN, cache)
        out_RHNh = grouped_attention(q_RHNh, k_RKWh, v_RKWh, cache.mask_R1NW)
        return self.o(out_RHNh.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def rotated_key_value(self, x: Tensor, position: Tensor) -> KeysValues:
        """Return rotated keys and values [..., K, h]."""
        k, v = self.key_value(x)
        return rope(k, position, self.frequency(x.device)), v


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """The common part of EAGLE-1's and EAGLE-3's layers: attention over an input of some size, and
    the MLP after it."""

    def __init__(self, shape: LayerShape, in_size: int | None = None) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(shape, in_size), SwiGLU(shape)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        # kernels that compute `decode`; they return None for a cache that they cannot use
        self.fused: Callable[[Tensor, Tensor, Tensor, DraftCache], Tensor | None] | None = None

    def decode(self, input_RNX: Tensor, residual_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """Return the layer's output [R, N, D] for the next nodes of the cache.

        Args:
            input_RNX: the input of attention.
        """
        output = None if self.fused is None else self.fused(input_RNX, residual_RND, position_RN, cache)
        return self.finish(residual_RND, self.attention(input_RNX, position_RN, cache)) if output is None else output

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output, then the MLP of its norm."""
        hidden = residual + attended
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]
