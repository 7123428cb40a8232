"""The arithmetic of LLaMA layers in numpy, float32: norms, RoPE, attention over a cache, MLP.

Letters: N new tokens or nodes, W slots of a cache, D hidden, H heads, K key-value heads, h head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Cache", "Doubles", "Floats", "Ints", "Layer", "log_softmax", "rms_norm", "silu"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x / rms(x) * weight."""
    scale = np.sqrt(np.mean(np.square(x), -1, keepdims=True) + np.float32(eps))
    return np.asarray(x / scale * weight, np.float32)


def silu(x: Floats) -> Floats:
    """Return x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)), np.float32)


def log_softmax(logits: Floats) -> Floats:
    """Return log softmax over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), np.float32)


def rope(x_NHh: Floats, position_N: Ints, theta: float) -> Floats:
    """Rotate the two halves of every head by position * theta^(-2 i / h)."""
    half = x_NHh.shape[-1] // 2
    frequency = np.float32(theta) ** -(np.arange(half, dtype=np.float32) / np.float32(half))
    angle = position_N[:, None, None].astype(np.float32) * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x_NHh[..., :half], x_NHh[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


class Cache:
    """The keys and values of one layer. Keys are kept before RoPE, with their positions, so that a window can move them."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.key_WKh = np.zeros((0, kv_heads, head_dim), np.float32)
        self.value_WKh = self.key_WKh.copy()
        self.position_W = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.position_W)

    def add(self, key_NKh: Floats, value_NKh: Floats, position_N: Ints) -> None:
        """Append slots."""
        self.key_WKh = np.concatenate([self.key_WKh, key_NKh])
        self.value_WKh = np.concatenate([self.value_WKh, value_NKh])
        self.position_W = np.concatenate([self.position_W, position_N])

    def keep(self, slots: Sequence[int]) -> None:
        """Keep these slots, in this order, and drop all others."""
        index = np.asarray(slots, np.int64)
        self.key_WKh, self.value_WKh = self.key_WKh[index], self.value_WKh[index]
        self.position_W = self.position_W[index]


class Layer:
    """One decoder layer, with the names of Hugging Face's LLaMA and Qwen3 below `prefix`."""

    def __init__(self, tensors: Mapping[str, Floats], prefix: str, config: Mapping[str, Any]) -> None:
        self.tensors, self.prefix, self.config = tensors, prefix, config
        self.eps: float = config["rms_norm_eps"]
        rope_parameters = config.get("rope_parameters") or {}
        self.theta: float = rope_parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
        self.head_dim: int = config["head_dim"]
        self.kv_heads: int = config["num_key_value_heads"]

    def weight(self, name: str) -> Floats:
        """Return the matrix of this name."""
        return self.tensors[f"{self.prefix}{name}.weight"]

    def norm(self, name: str, x: Floats) -> Floats:
        """Return the norm of this name, of x."""
        return rms_norm(x, self.weight(name), self.eps)

    def new_cache(self) -> Cache:
        """Return an empty cache for this layer."""
        return Cache(self.kv_heads, self.head_dim)

    def _heads(self, name: str, x_NX: Floats) -> Floats:
        """Return one of the projections q and k of x, split into heads, with Qwen3's norm if the layer has it."""
        heads = (x_NX @ self.weight(f"self_attn.{name}_proj").T).reshape(len(x_NX), -1, self.head_dim)
        if f"{self.prefix}self_attn.{name}_norm.weight" in self.tensors:
            heads = self.norm(f"self_attn.{name}_norm", heads)
        return heads

    def store(self, x_NX: Floats, position_N: Ints, cache: Cache) -> None:
        """Append the keys and values of x to the cache."""
        values = (x_NX @ self.weight("self_attn.v_proj").T).reshape(len(x_NX), -1, self.head_dim)
        cache.add(self._heads("k", x_NX), values, position_N)

    def attend(self, x_NX: Floats, position_N: Ints, cache: Cache, visible_NW: Bools) -> Floats:
        """Return the attention of x to the slots of the cache that it may see."""
        query_NHh = rope(self._heads("q", x_NX), position_N, self.theta)
        key_WKh = rope(cache.key_WKh, cache.position_W, self.theta)
        groups = query_NHh.shape[1] // self.kv_heads
        key_WHh, value_WHh = np.repeat(key_WKh, groups, 1), np.repeat(cache.value_WKh, groups, 1)
        score_HNW = np.einsum("nhd,whd->hnw", query_NHh, key_WHh) / np.float32(np.sqrt(self.head_dim))
        score_HNW = np.where(visible_NW, score_HNW, np.float32(-np.inf))
        out_NHh = np.einsum("hnw,whd->nhd", np.exp(log_softmax(score_HNW)), value_WHh)
        return np.asarray(out_NHh.reshape(len(x_NX), -1) @ self.weight("self_attn.o_proj").T, np.float32)

    def mlp(self, x: Floats) -> Floats:
        """Return the gated MLP of x."""
        gated = silu(x @ self.weight("mlp.gate_proj").T) * (x @ self.weight("mlp.up_proj").T)
        return np.asarray(gated @ self.weight("mlp.down_proj").T, np.float32)

    def __call__(self, x_NX: Floats, residual_ND: Floats, position_N: Ints, cache: Cache, visible_NW: Bools) -> Floats:
        """Store x, attend, and return the layer's output: both parts are added to the residual stream."""
        self.store(x_NX, position_N, cache)
        hidden_ND = residual_ND + self.attend(x_NX, position_N, cache, visible_NW)
        return hidden_ND + self.mlp(self.norm("post_attention_layernorm", hidden_ND))
