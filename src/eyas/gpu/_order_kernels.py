"""Triton kernels whose sums have one order, whatever else is in the pass: a matrix product, and attention that reads keys
by position. `_order_ops.py` says what they compute, and why this order is plain decoding's.

One configuration serves every number of tokens. A row of a tile is computed like any other, so what the other rows hold
changes no bit of it.

This module is imported on GPUs and by tests with Triton's interpreter only. Not yet run on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine", "parts", "product"]

LOG2_E = 1.4426950408889634
ROWS = 64  # of a tile: queries, or tokens of a product


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, weight, bias, out, M, outputs, inputs, x_m, w_o,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One tile of the outputs of some tokens: blocks of inputs in order, never split among programs."""
    m, o = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    x_at, w_at = x + m.to(tl.int64)[:, None] * x_m, weight + o.to(tl.int64)[:, None] * w_o
    total_MO = tl.full([BLOCK_M, BLOCK_O], 0.0, tl.float32)
    for start in range(0, inputs, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        x_MI = tl.load(x_at + i[None, :], mask=(m < M)[:, None] & (i < inputs)[None, :], other=0.0)
        w_OI = tl.load(w_at + i[None, :], mask=(o < outputs)[:, None] & (i < inputs)[None, :], other=0.0)
        total_MO += tl.dot(x_MI, tl.trans(w_OI), input_precision="ieee")
    if BIAS:
        total_MO += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(at, total_MO.to(out.dtype.element_ty), mask=(m < M)[:, None] & (o < outputs)[None, :])


@triton.jit
def _attend(q_Mh, key_at, value_at, allowed_MN, read_Nh, scale, top_M, sum_M, mixed_Mh):
    """Add a block of keys and values to the running softmax. A row that sees none of them keeps its bits."""
    key_Nh = tl.load(key_at, mask=read_Nh, other=0.0)
    score_MN = tl.dot(q_Mh, tl.trans(key_Nh), input_precision="ieee") * scale
    score_MN = tl.where(allowed_MN, score_MN, float("-inf"))
    higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    keep_M = tl.exp2(top_M - base_M)
    value_Nh = tl.load(value_at, mask=read_Nh, other=0.0)
    added_Mh = tl.dot(weight_MN.to(value_Nh.dtype), value_Nh, input_precision="ieee")
    return higher_M, sum_M * keep_M + tl.sum(weight_MN, 1), mixed_Mh * keep_M[:, None] + added_Mh


@triton.jit(do_not_specialize=["Q", "T", "window", "p_r", "p_q"])
def _parts_kernel(
    q, key, value, length, path, depth, out, lse,
    Q, T, scale, window,
    q_r, q_n, q_h, k_r, k_k, k_s, v_r, v_k, v_s, p_r, p_q,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One tile of queries (node, head of the group) of one key-value head, over the positions of one part."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row, head, part = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    first = tl.program_id(0) * BLOCK_M
    node_M, query_head_M = (
        (first + tl.arange(0, BLOCK_M)) // GROUP,
        head * GROUP + (first + tl.arange(0, BLOCK_M)) % GROUP,
    )
    there_M = node_M < Q
    h, wide = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_H) < WIDTH
    q_at = q + row * q_r + node_M[:, None] * q_n + query_head_M[:, None] * q_h + h[None, :]
    q_Mh = tl.load(q_at, mask=there_M[:, None] & wide[None, :], other=0.0)
    committed = tl.load(length + row).to(tl.int32)
    position_M = committed + tl.load(depth + row * Q + node_M, mask=there_M, other=-(2**30)).to(tl.int32)
    last = tl.max(position_M, 0)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.full([BLOCK_M], 0.0, tl.float32)
    mixed_Mh = tl.full([BLOCK_M, BLOCK_H], 0.0, tl.float32)
    key_base, value_base = key + row.to(tl.int64) * k_r + head * k_k, value + row.to(tl.int64) * v_r + head * v_k
    for start in range(part * PART, tl.minimum((part + 1) * PART, last + 1), BLOCK_N):
        position_N = start + tl.arange(0, BLOCK_N)
        near_MN = there_M[:, None] & (position_N[None, :] <= position_M[:, None])
        if WINDOWED:
            near_MN = near_MN & (position_M[:, None] - position_N[None, :] < window)
        if start + BLOCK_N <= committed:  # all nodes read the same keys
            read_Nh = (position_N >= 0)[:, None] & wide[None, :]
            top_M, sum_M, mixed_Mh = _attend(
                q_Mh, key_base + position_N[:, None] * k_s + h[None, :], value_base + position_N[:, None] * v_s + h[None, :],
                near_MN, read_Nh, scale, top_M, sum_M, mixed_Mh,
            )  # fmt: skip
        else:  # each node reads the keys of its own path
            for node in range(first // GROUP, tl.minimum((first + BLOCK_M - 1) // GROUP + 1, Q)):
                below_N = position_N >= committed
                on_path_N = tl.load(
                    path + row * p_r + node * p_q + position_N - committed, mask=below_N & (position_N < committed + T), other=-1
                )  # fmt: skip
                slot_N = tl.where(below_N, committed + on_path_N.to(tl.int32), position_N)
                known_N = (position_N < committed) | (on_path_N >= 0)
                read_Nh = known_N[:, None] & wide[None, :]
                top_M, sum_M, mixed_Mh = _attend(
                    q_Mh, key_base + slot_N[:, None] * k_s + h[None, :], value_base + slot_N[:, None] * v_s + h[None, :],
                    near_MN & (node_M == node)[:, None] & known_N[None, :], read_Nh, scale, top_M, sum_M, mixed_Mh,
                )  # fmt: skip

    empty_M = sum_M == 0.0
    mixed_Mh = mixed_Mh / tl.where(empty_M, 1.0, sum_M)[:, None]
    rows = tl.num_programs(1) // KV_HEADS
    flat_M = ((part * rows + row) * Q + node_M) * HEADS + query_head_M
    tl.store(out + flat_M.to(tl.int64)[:, None] * WIDTH + h[None, :], mixed_Mh, mask=there_M[:, None] & wide[None, :])
    log_sum_M = tl.where(empty_M, float("-inf"), top_M + tl.log2(tl.where(empty_M, 1.0, sum_M)))
    tl.store(lse + flat_M, log_sum_M, mask=there_M)


@triton.jit(do_not_specialize=["queries", "count"])
def _combine_kernel(parts, lse, out, queries, count, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr):
    """Average one query's parts, one after the other; a part without keys changes no bit."""
    query, h = tl.program_id(0), tl.arange(0, BLOCK_H)
    top = float("-inf")
    for part in range(count):
        top = tl.maximum(top, tl.load(lse + part * queries + query))
    total, mixed_h = 0.0, tl.full([BLOCK_H], 0.0, tl.float32)
    for part in range(count):
        share = tl.exp2(tl.load(lse + part * queries + query) - top)
        at = parts + (part * queries + query).to(tl.int64) * WIDTH + h
        total += share
        mixed_h += share * tl.load(at, mask=h < WIDTH, other=0.0)
    tl.store(out + query.to(tl.int64) * WIDTH + h, (mixed_h / total).to(out.dtype.element_ty), mask=h < WIDTH)


def product(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_MO: Tensor) -> None:
    """Fill `out`: see `_order_ops.fixed_product`."""
    (M, inputs), outputs = x_MI.shape, len(weight_OI)
    assert x_MI.stride(1) == weight_OI.stride(1) == 1, "inputs are contiguous"
    block_o = 64 if x_MI.element_size() == 2 else 32
    _product_kernel[(triton.cdiv(M, ROWS), triton.cdiv(outputs, block_o))](
        x_MI, weight_OI, weight_OI if bias_O is None else bias_O, out_MO, M, outputs, inputs, x_MI.stride(0), weight_OI.stride(0),
        BIAS=bias_O is not None, BLOCK_M=ROWS, BLOCK_O=block_o, BLOCK_I=64, num_warps=4, num_stages=3,
    )  # fmt: skip


def parts(
    q_RQHh: Tensor, key_RKSh: Tensor, value_RKSh: Tensor, length_R: Tensor, path_RQT: Tensor, depth_RQ: Tensor, scale: float,
    window: int, part_keys: int, out_SRQHh: Tensor, lse_SRQH: Tensor,
) -> None:  # fmt: skip
    """Fill `out` and `lse` (base 2) for S parts of `part_keys` positions each: see `_order_ops.fixed_attention`."""
    (R, Q, H, h), K = q_RQHh.shape, key_RKSh.shape[1]
    assert q_RQHh.stride(3) == key_RKSh.stride(3) == value_RKSh.stride(3) == path_RQT.stride(2) == 1, (
        "heads are contiguous"
    )
    block_n = 64 if q_RQHh.element_size() == 2 else 32
    assert part_keys % block_n == 0, "a block lies in one part"
    _parts_kernel[(triton.cdiv(Q * (H // K), ROWS), R * K, len(out_SRQHh))](
        q_RQHh, key_RKSh, value_RKSh, length_R, path_RQT, depth_RQ, out_SRQHh, lse_SRQH, Q, path_RQT.shape[2], scale * LOG2_E, window,
        *q_RQHh.stride()[:3], *key_RKSh.stride()[:3], *value_RKSh.stride()[:3], *path_RQT.stride()[:2],
        GROUP=H // K, HEADS=H, WIDTH=h, PART=part_keys, WINDOWED=window > 0,
        BLOCK_M=ROWS, BLOCK_N=block_n, BLOCK_H=triton.next_power_of_2(max(h, 16)), num_warps=4, num_stages=2,
    )  # fmt: skip


def combine(parts_SRQHh: Tensor, lse_SRQH: Tensor, out_RQHh: Tensor) -> None:
    """Fill `out` with the parts, weighted by their shares of the softmax's denominator."""
    S, R, Q, H, h = parts_SRQHh.shape
    _combine_kernel[(R * Q * H,)](
        parts_SRQHh, lse_SRQH, out_RQHh, R * Q * H, S, WIDTH=h, BLOCK_H=triton.next_power_of_2(h), num_warps=4
    )  # fmt: skip
