"""The GPU kernels as operators of torch, one kernel each: by Triton on CUDA, in torch
(`_reference.py`) on a CPU.

As operators they have shapes without being run, so torch.compile and tests on fake tensors see
through them.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eyas.gpu import _reference

__all__ = ["add_norm", "attention", "available", "join_norms", "quantise", "rms_norm", "rotate_and_store", "swiglu"]

CAPABILITY = (8, 0)  # the least CUDA compute capability: bfloat16 in matrix products
PARTS_PER_PROCESSOR = 2  # blocks of the attention kernel that a streaming multiprocessor should have
MIN_PART_KEYS = 64  # the least number of keys of a part
MAX_PARTS = 64


@cache
def available(device: torch.device) -> bool:
    """Return whether the kernels run on this device; on a CPU their references do, for tests."""
    if device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def attention_kernels() -> ModuleType:
    from eyas.gpu import _attention_kernels

    return _attention_kernels


def layer_kernels() -> ModuleType:
    from eyas.gpu import _layer_kernels

    return _layer_kernels


def attention(
    q_RQHh: Tensor, key_RKWh: Tensor, value_RKWh: Tensor, length_R: Tensor, visible_RQT: Tensor, position_RQ: Tensor, scale: float,
    window: int = 0, sink: int = 0,
) -> Tensor:  # fmt: skip
    """Attention [R, Q, H, h] of nodes to the committed slots of their rows and to the nodes that
    they see (`_reference.attention_parts`).

    W bounds the slots in use; how many they are is read on the device. One kernel for many queries,
    two for few: the keys are split.
    """
    (R, Q, H, _), (K, W) = q_RQHh.shape, key_RKWh.shape[1:3]
    splits = splits_of(R * K * -(-Q * (H // K) // 64), W, q_RQHh.device)
    if splits == 1:
        return _attention_whole(q_RQHh, key_RKWh, value_RKWh, length_R, visible_RQT, position_RQ, scale, window, sink)
    parts_SRQHh, lse_SRQH = _attention_parts(
        q_RQHh, key_RKWh, value_RKWh, length_R, visible_RQT, position_RQ, scale, window, sink, splits
    )  # fmt: skip
    return _attention_combine(parts_SRQHh, lse_SRQH, q_RQHh)


def splits_of(blocks: int, width: int, device: torch.device) -> int:
    """Into how many parts the keys are split, where there are `blocks` blocks of queries."""
    wanted = PARTS_PER_PROCESSOR * _processors(device) // max(1, blocks)
    return max(1, min(wanted, -(-width // MIN_PART_KEYS), MAX_PARTS))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132  # an H100 or H200; tests on a CPU split in the same way
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@torch.library.custom_op("eyas::attention_parts", mutates_args=())
def _attention_parts(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor,
    scale: float, window: int, sink: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = _empty_parts(q, key, value, length, visible, position, scale, window, sink, splits)
    attention_kernels().parts(q, key, value, length, visible, position, scale, window, sink, out, lse)
    return out, lse


@_attention_parts.register_fake
def _empty_parts(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor,
    scale: float, window: int, sink: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out_SRQHh = q.new_empty((splits, *q.shape), dtype=torch.float32)
    return out_SRQHh, out_SRQHh.new_empty(out_SRQHh.shape[:4])


@torch.library.custom_op("eyas::attention_combine", mutates_args=())
def _attention_combine(parts: Tensor, lse: Tensor, like: Tensor) -> Tensor:
    out = _empty_combined(parts, lse, like)
    attention_kernels().combine(parts, lse, out)
    return out


@_attention_combine.register_fake
def _empty_combined(parts: Tensor, lse: Tensor, like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


@torch.library.custom_op("eyas::attention_whole", mutates_args=())
def _attention_whole(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor, scale: float, window: int, sink: int
) -> Tensor:  # fmt: skip
    out = q.new_empty(q.shape)
    attention_kernels().parts(q, key, value, length, visible, position, scale, window, sink, out[None], None)
    return out


@_attention_whole.register_fake
def _empty_whole(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor, scale: float, window: int, sink: int
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


@torch.library.custom_op("eyas::add_norm", mutates_args=())
def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed, normed = _empty_normed(x, residual, weight, eps)
    layer_kernels().add_norm(x, residual, weight, eps, summed, normed)
    return summed, normed


@add_norm.register_fake
def _empty_normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("eyas::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    layer_kernels().add_norm(x, None, weight, eps, None, normed := x.new_empty(x.shape))
    return normed


@rms_norm.register_fake
def _empty_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("eyas::join_norms", mutates_args=())
def join_norms(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    out = _empty_joined(a, b, weight_a, weight_b, eps)
    layer_kernels().join_norms(a, b, weight_a, weight_b, eps, out)
    return out


@join_norms.register_fake
def _empty_joined(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    return a.new_empty((*a.shape[:-1], 2 * a.shape[-1]))


@torch.library.custom_op("eyas::quantise", mutates_args=())
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    if not available(x.device):
        return _reference.quantise(x)
    out, scale = _empty_quantised(x)
    layer_kernels().quantise(x, out, scale)
    return out, scale


@quantise.register_fake
def _empty_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    tokens = x.numel() // x.shape[-1]
    return x.new_empty((tokens, x.shape[-1]), dtype=torch.float8_e4m3fn), x.new_empty((tokens, 1), dtype=torch.float32)


@torch.library.custom_op("eyas::rotate_and_store", mutates_args=("key", "value", "unrotated"))
def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, length: Tensor, first: int,
    key: Tensor, value: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, unrotated: Tensor | None,
) -> Tensor:  # fmt: skip
    out = _empty_rotated(q, k, v, cosine, sine, position, length, first, key, value, q_norm, k_norm, eps, unrotated)
    layer_kernels().rotate_and_store(
        q, k, v, cosine, sine, position, length, first, key, value, q_norm, k_norm, eps, unrotated, out
    )  # fmt: skip
    return out


@rotate_and_store.register_fake
def _empty_rotated(
    q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, position: Tensor, length: Tensor, first: int,
    key: Tensor, value: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, unrotated: Tensor | None,
) -> Tensor:  # fmt: skip
    h = key.shape[-1]
    return q.new_empty((*q.shape[:2], q.shape[2] // h, h))


@torch.library.custom_op("eyas::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = _empty_gated(gate, up)
    layer_kernels().swiglu(gate, up, out)
    return out


@swiglu.register_fake
def _empty_gated(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _on_cpu(operator: Any, function: Any) -> None:
    operator.register_kernel("cpu")(function)


def _whole(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, visible: Tensor, position: Tensor, scale: float, window: int, sink: int
) -> Tensor:  # fmt: skip
    parts, lse = _reference.attention_parts(q, key, value, length, visible, position, scale, window, sink, 1)
    return _reference.attention_combine(parts, lse, q.dtype)


_on_cpu(_attention_parts, _reference.attention_parts)
_on_cpu(_attention_combine, lambda parts, lse, like: _reference.attention_combine(parts, lse, like.dtype))
_on_cpu(_attention_whole, _whole)
_on_cpu(add_norm, _reference.add_norm)
_on_cpu(rms_norm, _reference.rms_norm)
_on_cpu(join_norms, _reference.join_norms)
_on_cpu(quantise, _reference.quantise)
_on_cpu(rotate_and_store, _reference.rotate_and_store)
_on_cpu(swiglu, _reference.swiglu)
