"""Triton kernels: attention of tree nodes to a cache, split over the keys. `_reference.py` describes their results.

This module is imported on GPUs and by tests with Triton's interpreter only. It uses features that
Triton has had since 3.0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine", "parts"]

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["Q", "T", "splits", "window", "m_r", "m_q", "m_t"])
def _parts_kernel(
    q, key, value, length, visible, position, out, lse,
    Q, T, splits, scale, window,
    q_r, q_n, q_h, k_r, k_k, k_s, v_r, v_k, v_s, m_r, m_q, m_t,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SINGLE: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One block of queries of one key-value head, over one part of the keys. A query is (node, head
    of the group)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row, head, part = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    index_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node_M, query_head_M = index_M // GROUP, head * GROUP + index_M % GROUP
    there_M = node_M < Q
    h, wide = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_H) < WIDTH
    q_at = q + row * q_r + node_M[:, None] * q_n + query_head_M[:, None] * q_h + h[None, :]
    q_Mh = tl.load(q_at, mask=there_M[:, None] & wide[None, :], other=0.0)

    committed = tl.load(length + row).to(tl.int32)
    total = committed + T
    position_M = tl.full([BLOCK_M], 0, tl.int32)
    origin = 0
    if WINDOWED:  # slots before all queries' windows are not read
        position_M = tl.load(position + row * Q + node_M, mask=there_M, other=2**30).to(tl.int32)
        origin = tl.minimum(tl.maximum(tl.min(position_M, 0) - window + 1, 0), committed) // BLOCK_N * BLOCK_N
    share = ((total - origin + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    begin = origin + part * share
    end = tl.minimum(begin + share, total)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.full([BLOCK_M], 0.0, tl.float32)
    mixed_Mh = tl.full([BLOCK_M, BLOCK_H], 0.0, tl.float32)
    key_base, value_base = key + row.to(tl.int64) * k_r + head * k_k, value + row.to(tl.int64) * v_r + head * v_k
    for start in range(begin, end, BLOCK_N):
        slot_N = start + tl.arange(0, BLOCK_N)
        inside_N = slot_N < end
        both_Nh = inside_N[:, None] & wide[None, :]
        key_Nh = tl.load(key_base + slot_N[:, None] * k_s + h[None, :], mask=both_Nh, other=0.0)
        score_MN = tl.dot(q_Mh, tl.trans(key_Nh), input_precision="ieee") * scale
        allowed_MN = there_M[:, None] & inside_N[None, :]
        if WINDOWED:
            near_MN = position_M[:, None] - slot_N[None, :] < window
            allowed_MN = allowed_MN & (near_MN | (slot_N[None, :] >= committed))
        if start + BLOCK_N > committed:  # slots of nodes: the tree's mask
            node_N = slot_N - committed
            is_node_MN = there_M[:, None] & ((node_N >= 0) & (node_N < T))[None, :]
            at = visible + row * m_r + node_M[:, None] * m_q + node_N[None, :] * m_t
            seen_MN = tl.load(at, mask=is_node_MN, other=1)
            allowed_MN = allowed_MN & (seen_MN != 0)
        score_MN = tl.where(allowed_MN, score_MN, float("-inf"))
        higher_M = tl.maximum(top_M, tl.max(score_MN, 1))
        base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weight_MN = tl.exp2(score_MN - base_M[:, None])
        keep_M = tl.exp2(top_M - base_M)
        sum_M = sum_M * keep_M + tl.sum(weight_MN, 1)
        value_Nh = tl.load(value_base + slot_N[:, None] * v_s + h[None, :], mask=both_Nh, other=0.0)
        mixed_Mh = mixed_Mh * keep_M[:, None] + tl.dot(weight_MN.to(value_Nh.dtype), value_Nh, input_precision="ieee")
        top_M = higher_M

    empty_M = sum_M == 0.0
    mixed_Mh = mixed_Mh / tl.where(empty_M, 1.0, sum_M)[:, None]
    rows = tl.num_programs(1) // KV_HEADS
    flat_M = ((part * rows + row) * Q + node_M) * HEADS + query_head_M
    out_at = out + flat_M.to(tl.int64)[:, None] * WIDTH + h[None, :]
    tl.store(out_at, mixed_Mh.to(out.dtype.element_ty), mask=there_M[:, None] & wide[None, :])
    if not SINGLE:
        log_sum_M = tl.where(empty_M, float("-inf"), top_M + tl.log2(tl.where(empty_M, 1.0, sum_M)))
        tl.store(lse + flat_M, log_sum_M, mask=there_M)


@triton.jit(do_not_specialize=["queries", "splits"])
def _combine_kernel(
    parts, lse, out, queries, splits, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Average one query's parts, weighted by their shares of the softmax's denominator."""
    query, s, h = tl.program_id(0), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_H)
    lse_S = tl.load(lse + s * queries + query, mask=s < splits, other=float("-inf"))
    top = tl.max(lse_S, 0)
    share_S = tl.exp2(lse_S - tl.where(top == float("-inf"), 0.0, top))
    both_Sh = (s < splits)[:, None] & (h < WIDTH)[None, :]
    at = parts + (s[:, None].to(tl.int64) * queries + query) * WIDTH + h[None, :]
    part_Sh = tl.load(at, mask=both_Sh, other=0.0)
    total = tl.sum(share_S, 0)
    mixed_h = tl.sum(part_Sh * share_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + query.to(tl.int64) * WIDTH + h, mixed_h.to(out.dtype.element_ty), mask=h < WIDTH)


def parts(
    q_RQHh: Tensor, key_RKSh: Tensor, value_RKSh: Tensor, length_R: Tensor, visible_RQT: Tensor, position_RQ: Tensor,
    scale: float, window: int, out_SRQHh: Tensor, lse_SRQH: Tensor | None,
) -> None:  # fmt: skip
    """Fill `out` and `lse` (base 2): see `_reference.attention_parts`. Without `lse` there is one
    part, which is the result."""
    (R, Q, H, h), K, S = q_RQHh.shape, key_RKSh.shape[1], out_SRQHh.shape[0]
    assert q_RQHh.stride(3) == key_RKSh.stride(3) == value_RKSh.stride(3) == 1, "heads are contiguous"
    queries = Q * (H // K)
    block_m = 16 if queries <= 16 else 32 if queries <= 32 else 64
    block_n = 64 if q_RQHh.element_size() == 2 else 32
    grid = (triton.cdiv(queries, block_m), R * K, S)
    _parts_kernel[grid](
        q_RQHh, key_RKSh, value_RKSh, length_R, visible_RQT.view(torch.uint8), position_RQ.contiguous(),
        out_SRQHh, out_SRQHh if lse_SRQH is None else lse_SRQH,
        Q, visible_RQT.shape[2], S, scale * LOG2_E, window,
        *q_RQHh.stride()[:3], *key_RKSh.stride()[:3], *value_RKSh.stride()[:3], *visible_RQT.stride(),
        GROUP=H // K, HEADS=H, WIDTH=h, SINGLE=lse_SRQH is None, WINDOWED=window > 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_H=triton.next_power_of_2(max(h, 16)),
        num_warps=4 if lse_SRQH is not None else 8, num_stages=3 if block_m == 16 else 2,
    )  # fmt: skip


def combine(parts_SRQHh: Tensor, lse_SRQH: Tensor, out_RQHh: Tensor) -> None:
    """Fill `out`: see `_reference.attention_combine`."""
    S, R, Q, H, h = parts_SRQHh.shape
    _combine_kernel[(R * Q * H,)](
        parts_SRQHh, lse_SRQH, out_RQHh, R * Q * H, S,
        WIDTH=h, BLOCK_S=triton.next_power_of_2(S), BLOCK_H=triton.next_power_of_2(h), num_warps=4,
    )  # fmt: skip
