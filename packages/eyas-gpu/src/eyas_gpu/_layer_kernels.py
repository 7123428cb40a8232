"""Triton kernels for the steps between the matrix products of a LLaMA layer. `_reference.py` describes their results.

This module is imported on GPUs and by tests with Triton's interpreter only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm", "join_norms", "quantise", "rotate_and_store", "swiglu"]


@triton.jit
def _norm(x, weight, count, eps):
    """x / rms(x), rounded to the weight's dtype, times the weight."""
    scaled = x / tl.sqrt(tl.sum(x * x, 0) / count + eps)
    return scaled.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def _add_norm_kernel(
    x, residual, weight, summed, normed, D, x_m, r_m, eps, ADDS: tl.constexpr, KEEPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = d < D
    x_D = tl.load(x + token * x_m + d, mask=inside, other=0.0)
    if ADDS:
        x_D = (x_D.to(tl.float32) + tl.load(residual + token * r_m + d, mask=inside, other=0.0).to(tl.float32)).to(
            x_D.dtype
        )
    weight_D = tl.load(weight + d, mask=inside, other=0.0)
    if KEEPS:
        tl.store(summed + token * D + d, x_D, mask=inside)
    tl.store(
        normed + token * D + d, _norm(x_D.to(tl.float32), weight_D, D, eps).to(normed.dtype.element_ty), mask=inside
    )


@triton.jit
def _join_norms_kernel(a, b, weight_a, weight_b, out, D, a_m, b_m, eps, BLOCK: tl.constexpr):
    token, second, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = d < D
    source, weight = a + token * a_m, weight_a
    if second:
        source, weight = b + token * b_m, weight_b
    x_D = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    normed_D = _norm(x_D, tl.load(weight + d, mask=inside, other=0.0), D, eps)
    tl.store(out + (2 * token + second) * D + d, normed_D.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantise_kernel(x, out, scale, width, x_m, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x_I = tl.load(x + token * x_m + i, mask=i < width, other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(x_I), 0) / LARGEST, 1e-12)
    tl.store(scale + token, step)
    tl.store(out + token * width + i, (x_I / step).to(out.dtype.element_ty), mask=i < width)


@triton.jit(do_not_specialize=["Q", "first"])
def _rotate_kernel(
    q, k, v, cosine, sine, position, length, q_norm, k_norm, q_out, key, value, unrotated,
    Q, first, q_m, k_m, v_m, k_r, k_k, k_s, v_r, v_k, v_s, u_r, u_k, u_s, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    UNROTATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token: query heads first, then key heads, then value heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, node = token // Q, token % Q
    h = tl.arange(0, BLOCK)
    inside = h < HALF
    slot = tl.load(length + row) + first + node
    if head >= HEADS + KV_HEADS:
        kv = head - HEADS - KV_HEADS
        source, goal = v + token * v_m + kv * 2 * HALF, value + row * v_r + kv * v_k + slot * v_s
        tl.store(goal + h, tl.load(source + h, mask=inside), mask=inside)
        tl.store(goal + HALF + h, tl.load(source + HALF + h, mask=inside), mask=inside)
    else:
        at = tl.load(position + token) * HALF
        cos = tl.load(cosine + at + h, mask=inside).to(tl.float32)
        sin = tl.load(sine + at + h, mask=inside).to(tl.float32)
        if head < HEADS:
            source = q + token * q_m + head * 2 * HALF
            a, b = tl.load(source + h, mask=inside, other=0.0), tl.load(source + HALF + h, mask=inside, other=0.0)
            low, high = a.to(tl.float32), b.to(tl.float32)
            if Q_NORM:
                low, high = _normed_halves(low, high, q_norm, h, inside, HALF, eps)
                low, high = low.to(a.dtype).to(tl.float32), high.to(a.dtype).to(tl.float32)
            goal = q_out + (token * HEADS + head) * 2 * HALF
            tl.store(goal + h, (low * cos - high * sin).to(a.dtype), mask=inside)
            tl.store(goal + HALF + h, (high * cos + low * sin).to(a.dtype), mask=inside)
        else:
            kv = head - HEADS
            source = k + token * k_m + kv * 2 * HALF
            a, b = tl.load(source + h, mask=inside, other=0.0), tl.load(source + HALF + h, mask=inside, other=0.0)
            low, high = a.to(tl.float32), b.to(tl.float32)
            if K_NORM:
                low, high = _normed_halves(low, high, k_norm, h, inside, HALF, eps)
                low, high = low.to(a.dtype).to(tl.float32), high.to(a.dtype).to(tl.float32)
            if UNROTATED:
                plain = unrotated + row * u_r + kv * u_k + slot * u_s
                tl.store(plain + h, low.to(a.dtype), mask=inside)
                tl.store(plain + HALF + h, high.to(a.dtype), mask=inside)
            goal = key + row * k_r + kv * k_k + slot * k_s
            tl.store(goal + h, (low * cos - high * sin).to(a.dtype), mask=inside)
            tl.store(goal + HALF + h, (high * cos + low * sin).to(a.dtype), mask=inside)


@triton.jit
def _normed_halves(low, high, weight, h, inside, HALF: tl.constexpr, eps):
    """Both halves of a head, over the root of their common mean square, times the weight."""
    scale = tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
    weight_low = tl.load(weight + h, mask=inside, other=0.0)
    weight_high = tl.load(weight + HALF + h, mask=inside, other=0.0)
    low, high = (low / scale).to(weight_low.dtype).to(tl.float32), (high / scale).to(weight_low.dtype).to(tl.float32)
    return low * weight_low.to(tl.float32), high * weight_high.to(tl.float32)


@triton.jit
def _swiglu_kernel(gate, up, out, width, g_m, u_m, BLOCK: tl.constexpr):
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate_I = tl.load(gate + token * g_m + i, mask=inside, other=0.0)
    up_I = tl.load(up + token * u_m + i, mask=inside, other=0.0).to(tl.float32)
    wide_I = gate_I.to(tl.float32)
    active_I = (wide_I / (1.0 + tl.exp(-wide_I))).to(gate_I.dtype).to(tl.float32)
    tl.store(out + token * width + i, (active_I * up_I).to(gate_I.dtype), mask=inside)


def _flat(x: Tensor) -> Tensor:
    """[..., X] as [tokens, X] without a copy: its tokens are at equal distances."""
    return x.view(-1, x.shape[-1]) if x.is_contiguous() else x.flatten(0, -2)


def add_norm(
    x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float, summed: Tensor | None, normed: Tensor
) -> None:
    """Fill `normed`, and `summed` if it is there: see `_reference.add_norm`."""
    x_MD, D = _flat(x), x.shape[-1]
    residual_MD = x_MD if residual is None else _flat(residual)
    _add_norm_kernel[(len(x_MD),)](
        x_MD, residual_MD, weight_D, normed if summed is None else summed, normed, D, x_MD.stride(0), residual_MD.stride(0), eps,
        ADDS=residual is not None, KEEPS=summed is not None, BLOCK=triton.next_power_of_2(D), num_warps=4 if D <= 2048 else 8,
    )  # fmt: skip


def join_norms(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, eps: float, out: Tensor) -> None:
    """Fill `out`: see `_reference.join_norms`."""
    a_MD, b_MD, D = _flat(a), _flat(b), a.shape[-1]
    _join_norms_kernel[(len(a_MD), 2)](
        a_MD, b_MD, weight_a, weight_b, out, D, a_MD.stride(0), b_MD.stride(0), eps, BLOCK=triton.next_power_of_2(D), num_warps=8
    )  # fmt: skip


def quantise(x: Tensor, out: Tensor, scale: Tensor) -> None:
    """Fill `out` and `scale`: see `_reference.quantise`."""
    x_MI, width = _flat(x), x.shape[-1]
    _quantise_kernel[(len(x_MI),)](
        x_MI, out, scale, width, x_MI.stride(0), LARGEST=448.0, BLOCK=triton.next_power_of_2(width), num_warps=8
    )  # fmt: skip


def rotate_and_store(
    q_RQX: Tensor, k_RQY: Tensor, v_RQY: Tensor, cosine_Ph: Tensor, sine_Ph: Tensor, position_RQ: Tensor, length_R: Tensor,
    first: int, key_RKWh: Tensor, value_RKWh: Tensor, q_norm_h: Tensor | None, k_norm_h: Tensor | None, eps: float,
    unrotated_RKWh: Tensor | None, out_RQHh: Tensor,
) -> None:  # fmt: skip
    """Store keys and values, and fill `out` with rotated queries: see `_reference.rotate_and_store`."""
    (R, Q), (K, _, h) = position_RQ.shape, key_RKWh.shape[1:]
    H = out_RQHh.shape[2]
    q_MX, k_MY, v_MY = (_flat(x) for x in (q_RQX, k_RQY, v_RQY))
    plain = key_RKWh if unrotated_RKWh is None else unrotated_RKWh
    _rotate_kernel[(R * Q, H + 2 * K)](
        q_MX, k_MY, v_MY, cosine_Ph, sine_Ph, position_RQ.contiguous(), length_R, cosine_Ph if q_norm_h is None else q_norm_h,
        cosine_Ph if k_norm_h is None else k_norm_h, out_RQHh, key_RKWh, value_RKWh, plain,
        Q, first, q_MX.stride(0), k_MY.stride(0), v_MY.stride(0), *key_RKWh.stride()[:3], *value_RKWh.stride()[:3], *plain.stride()[:3],
        eps, HEADS=H, KV_HEADS=K, HALF=h // 2, Q_NORM=q_norm_h is not None, K_NORM=k_norm_h is not None,
        UNROTATED=unrotated_RKWh is not None, BLOCK=triton.next_power_of_2(h // 2), num_warps=1,
    )  # fmt: skip


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Fill `out`: see `_reference.swiglu`."""
    gate_MI, up_MI, width = _flat(gate), _flat(up), gate.shape[-1]
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_kernel[(len(gate_MI), triton.cdiv(width, block))](
        gate_MI, up_MI, out, width, gate_MI.stride(0), up_MI.stride(0), BLOCK=block, num_warps=4
    )  # fmt: skip
