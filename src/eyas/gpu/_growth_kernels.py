"""Triton kernels that grow EAGLE-2's dynamic tree: the best children of a level's nodes, the choice
of the next level, the final tree. `drafters/_grow.py` is the reference.

    best_parts    one node, one block of the vocabulary: its best tokens, and the block's part of the softmax's denominators
    best_merge    one node: its best children
    step          one row: the values of all children; the best become the nodes of the next level
    rank, pack    one row: the most valuable of all drafted nodes, in the order of drafting
    build         one row: parents, depths and mask of these

Drafted nodes are numbered in the order of drafting, from 1; 0 is the root.
This module is imported on GPUs and by tests with Triton's interpreter only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.gpu._cycle_kernels import gumbel

__all__ = ["best_children", "build", "keep_best", "step"]

BLOCK_V = 1024  # tokens of the draft vocabulary that one program reads


@triton.jit(do_not_specialize=["Q", "level"])
def _best_parts_kernel(
    logits, ids, seed, greedy, position, top_key, top_score, top_index, sums,
    Q, V, parts, level, scale, sharpness,
    K: tl.constexpr, NOISY: tl.constexpr, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = node // Q
    index_V = part * BLOCK + tl.arange(0, BLOCK)
    left_V = index_V < V
    score_V = tl.load(logits + node * V + index_V, mask=left_V, other=float("-inf")).to(tl.float32) * scale
    score_V = tl.where(score_V != score_V, float("-inf"), score_V)
    key_V = score_V
    if NOISY:
        if tl.load(greedy + row) == 0:
            token_V = index_V.to(tl.int64)
            if HAS_IDS:
                token_V = tl.load(ids + index_V, mask=left_V, other=0)
            key_V = score_V + gumbel(tl.load(seed + row), 0, tl.load(position + row) + level + 1, token_V)
            key_V = tl.where(left_V, key_V, float("-inf"))
    at = node * parts + part
    top = tl.max(score_V, 0)
    tl.store(sums + at * 4, top)
    tl.store(sums + at * 4 + 1, tl.sum(tl.exp(score_V - tl.where(top == float("-inf"), 0.0, top)), 0))
    top = tl.max(key_V, 0)
    tl.store(sums + at * 4 + 2, top)
    tl.store(sums + at * 4 + 3, tl.sum(tl.exp((key_V - tl.where(top == float("-inf"), 0.0, top)) * sharpness), 0))
    for k in range(K):
        top = tl.max(tl.where(left_V, key_V, float("-inf")), 0)
        index = tl.min(tl.where(left_V & (key_V == top), index_V, 2**30), 0)
        is_it_V = index_V == index
        tl.store(top_key + at * K + k, top)
        tl.store(top_score + at * K + k, tl.max(tl.where(is_it_V, score_V, float("-inf")), 0))
        tl.store(top_index + at * K + k, index)
        left_V = left_V & (is_it_V == 0)


@triton.jit
def _log_sum(sums, at, inside, which: tl.constexpr, sharpness):
    """Logarithm of the sum of all parts' denominators."""
    top_P = tl.load(sums + at * 4 + which, mask=inside, other=float("-inf"))
    top = tl.max(top_P, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    sum_P = tl.load(sums + at * 4 + which + 1, mask=inside, other=0.0)
    return top * sharpness + tl.log(tl.sum(sum_P * tl.exp((top_P - top) * sharpness), 0))


@triton.jit
def _best_merge_kernel(
    top_key, top_score, top_index, sums, greedy, index, log_q, log_confidence, Q, parts, sharpness,
    K: tl.constexpr, COUPLED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    node, c, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    total = _log_sum(sums, node * parts + p, p < parts, 0, 1.0)
    key_total = _log_sum(sums, node * parts + p, p < parts, 2, sharpness)
    inside = c < parts * K
    key_C = tl.load(top_key + node * parts * K + c, mask=inside, other=float("-inf"))
    score_C = tl.load(top_score + node * parts * K + c, mask=inside, other=float("-inf"))
    index_C = tl.load(top_index + node * parts * K + c, mask=inside, other=2**30)
    left_C = index_C < 2**30
    determined = True
    if not COUPLED:
        determined = tl.load(greedy + node // Q) != 0
    for k in range(K):
        top = tl.max(tl.where(left_C, key_C, float("-inf")), 0)
        best = tl.min(tl.where(left_C & (key_C == top), index_C, 2**30), 0)
        is_it_C = index_C == best
        log_q_k = tl.minimum(tl.max(tl.where(is_it_C, score_C, float("-inf")), 0) - total, 0.0)
        tl.store(index + node * K + k, best.to(tl.int64))
        tl.store(log_q + node * K + k, log_q_k)
        sharpened_k = tl.minimum(top * sharpness - key_total, 0.0)
        tl.store(log_confidence + node * K + k, tl.where(determined, sharpened_k, log_q_k))
        left_C = left_C & (is_it_C == 0)


@triton.jit(do_not_specialize=["Q", "X", "first", "slots"])
def _step_kernel(
    index, log_q, log_confidence, ids, node_value, node_number, seen, tokens, scores, values, parents, roots,
    next_token, next_value, next_number, next_parent, next_seen, Q, X, first, slots, log_stop,
    K: tl.constexpr, HAS_IDS: tl.constexpr, BY_VALUE: tl.constexpr, FIRST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One row. X: all drafted nodes and the root; first: number of this level's first child; slots:
    nodes of earlier levels."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    inside = c < Q * K
    at = row * Q * K + c
    node_C = c // K
    index_C = tl.load(index + at, mask=inside, other=0)
    token_C = index_C
    if HAS_IDS:
        token_C = tl.load(ids + index_C, mask=inside, other=0)
    log_confidence_C = tl.load(log_confidence + at, mask=inside, other=float("-inf"))
    parent_C = tl.full([BLOCK_C], 0, tl.int64)
    value_C = log_confidence_C
    if FIRST:
        tl.store(tokens + row * X, tl.load(roots + row))
        tl.store(scores + row * X, 0.0)
        tl.store(values + row * X, 0.0)
        tl.store(parents + row * X, -1)
    else:
        parent_C = tl.load(node_number + row * Q + node_C, mask=inside, other=0)
        above_C = tl.load(node_value + row * Q + node_C, mask=inside, other=float("-inf"))
        log_confidence_C = tl.where(above_C <= log_stop, float("-inf"), log_confidence_C)
        value_C = above_C + log_confidence_C
    goal = row * X + first + c
    tl.store(tokens + goal, token_C, mask=inside)
    tl.store(scores + goal, tl.load(log_q + at, mask=inside, other=0.0), mask=inside)
    tl.store(values + goal, value_C, mask=inside)
    tl.store(parents + goal, parent_C, mask=inside)
    key_C, left_C, t = log_confidence_C, inside, tl.arange(0, BLOCK_T)
    if BY_VALUE:
        key_C = value_C
    for k in range(K):
        top = tl.max(tl.where(left_C, key_C, float("-inf")), 0)
        best = tl.min(tl.where(left_C & (key_C == top), c, 2**30), 0)
        is_it_C = c == best
        to = row * K + k
        tl.store(next_token + to, tl.max(tl.where(is_it_C, token_C, 0), 0))
        tl.store(next_value + to, tl.max(tl.where(is_it_C, value_C, float("-inf")), 0))
        tl.store(next_number + to, (first + best).to(tl.int64))
        tl.store(next_parent + to, (best // K).to(tl.int64))
        before_T = tl.load(seen + (row * Q + best // K) * slots + t, mask=t < slots, other=0)
        seen_T = tl.where(t < slots, before_T != 0, t == slots + k)
        tl.store(next_seen + to * (slots + K) + t, seen_T, mask=t < slots + K)
        left_C = left_C & (is_it_C == 0)


@triton.jit(do_not_specialize=["X", "most"])
def _rank_kernel(values, kept, X, most, BLOCK: tl.constexpr):
    """Whether each of a block of drafted nodes is among the `most` of the highest values; ties go
    to the earlier node."""
    row, i = tl.program_id(0).to(tl.int64), 1 + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value_I = tl.load(values + row * X + i, mask=i < X, other=float("-inf"))
    better_I = tl.full([BLOCK], 0, tl.int32)
    for start in range(1, X, BLOCK):
        j = start + tl.arange(0, BLOCK)
        value_J = tl.load(values + row * X + j, mask=j < X, other=float("-inf"))
        tie_IJ = (value_J[None, :] == value_I[:, None]) & (j[None, :] < i[:, None])
        before_IJ = ((value_J[None, :] > value_I[:, None]) | tie_IJ) & (j < X)[None, :]
        better_I += tl.sum(before_IJ.to(tl.int32), 1)
    tl.store(kept + row * X + i, better_I < most, mask=i < X)


@triton.jit(do_not_specialize=["X", "M"])
def _pack_kernel(kept, keep, X, M, BLOCK: tl.constexpr):
    """Write the numbers of the kept nodes, ascending."""
    row, i = tl.program_id(0).to(tl.int64), 1 + tl.arange(0, BLOCK)
    kept_I = tl.load(kept + row * X + i, mask=i < X, other=0).to(tl.int32)
    place_I = tl.cumsum(kept_I, 0) - 1
    tl.store(keep + row * M + place_I, i.to(tl.int64), mask=kept_I != 0)


@triton.jit(do_not_specialize=["X", "N", "depth"])
def _build_kernel(
    keep, tokens, scores, values, parents, token_out, score_out, value_out, parent_out, candidate_out, depth_out, mask_out,
    X, N, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < N
    number_N = tl.load(keep + row * (N - 1) + n - 1, mask=inside & (n > 0), other=0)
    number_N = tl.where(inside, number_N, -1)
    at, to = row * X + tl.maximum(number_N, 0), row * N + n
    value_N = tl.load(values + at, mask=inside, other=0.0)
    tl.store(token_out + to, tl.load(tokens + at, mask=inside, other=0), mask=inside)
    tl.store(score_out + to, tl.load(scores + at, mask=inside, other=0.0), mask=inside)
    tl.store(value_out + to, value_N, mask=inside)
    tl.store(candidate_out + to, value_N > float("-inf"), mask=inside)
    parent_N = tl.load(parents + at, mask=inside, other=-1)
    is_parent_NN = (parent_N[:, None] == number_N[None, :]) & inside[None, :]
    parent_node_N = tl.sum(tl.where(is_parent_NN, n[None, :], 0), 1)
    tl.store(parent_out + to, tl.where(n == 0, -1, parent_node_N).to(tl.int64), mask=inside)
    above_N = number_N
    depth_N = tl.full([BLOCK], 0, tl.int64)
    seen_NN = (n[None, :] == 0) & inside[:, None]
    for _ in range(depth):
        seen_NN = seen_NN | ((above_N[:, None] == number_N[None, :]) & (above_N > 0)[:, None])
        depth_N += (above_N > 0).to(tl.int64)
        above_N = tl.load(parents + row * X + tl.maximum(above_N, 0), mask=above_N > 0, other=0)
    tl.store(depth_out + to, depth_N, mask=inside)
    tl.store(mask_out + to[:, None] * N + n[None, :], seen_NN, mask=inside[:, None] & inside[None, :])


def best_children(
    logits_BQv: Tensor, ids_v: Tensor, has_ids: bool, seed_B: Tensor, greedy_B: Tensor, position_B: Tensor, level: int, temperature: float,
    confidence_temperature: float, noisy: bool, coupled: bool, index_BQK: Tensor, log_q_BQK: Tensor, log_confidence_BQK: Tensor,
) -> None:  # fmt: skip
    """Fill the best children of each node (`_cycle_ops.best_children`). Without `has_ids`, `ids_v`
    is not read."""
    (B, Q, V), K = logits_BQv.shape, index_BQK.shape[2]
    parts, greedy = triton.cdiv(V, BLOCK_V), greedy_B.view(torch.uint8)
    keys = log_q_BQK.new_empty((2, B * Q * parts * K))
    indices = index_BQK.new_empty(B * Q * parts * K, dtype=torch.int32)
    sums = log_q_BQK.new_empty(B * Q * parts * 4)
    sharpness = 1 / confidence_temperature
    _best_parts_kernel[(B * Q, parts)](
        logits_BQv.contiguous(), ids_v, seed_B, greedy, position_B, keys[0], keys[1], indices, sums,
        Q, V, parts, level, 1 / temperature, sharpness, K=K, NOISY=noisy, HAS_IDS=has_ids, BLOCK=BLOCK_V, num_warps=4,
    )  # fmt: skip
    _best_merge_kernel[(B * Q,)](
        keys[0], keys[1], indices, sums, greedy, index_BQK, log_q_BQK, log_confidence_BQK, Q, parts, sharpness,
        K=K, COUPLED=coupled, BLOCK_P=triton.next_power_of_2(parts), BLOCK_C=triton.next_power_of_2(parts * K), num_warps=4,
    )  # fmt: skip


def step(
    children: tuple[Tensor, Tensor, Tensor], ids_v: Tensor, has_ids: bool, nodes: tuple[Tensor, Tensor, Tensor],
    drafted: tuple[Tensor, Tensor, Tensor, Tensor], root_tokens_B: Tensor, first: int, log_stop: float, by_value: bool,
    chosen: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill this level's part of `drafted` and the next level's nodes (`_cycle_ops.grow_step`)."""
    (B, Q, K), slots, X = children[0].shape, nodes[2].shape[2], drafted[0].shape[1]
    seen, next_seen = nodes[2].view(torch.uint8), chosen[4].view(torch.uint8)
    _step_kernel[(B,)](
        *children, ids_v, *nodes[:2], seen, *drafted, root_tokens_B, *chosen[:4], next_seen, Q, X, first, slots, log_stop,
        K=K, HAS_IDS=has_ids, BY_VALUE=by_value, FIRST=first == 1, BLOCK_C=triton.next_power_of_2(Q * K),
        BLOCK_T=triton.next_power_of_2(slots + K), num_warps=4,
    )  # fmt: skip


def keep_best(values_BX: Tensor, selected_BM: Tensor) -> None:
    """Fill the numbers of the most valuable nodes (`_cycle_ops.keep_best`)."""
    (B, X), M = values_BX.shape, selected_BM.shape[1]
    kept = torch.empty((B, X), dtype=torch.uint8, device=values_BX.device)
    _rank_kernel[(B, triton.cdiv(X - 1, 64))](values_BX, kept, X, M, BLOCK=64, num_warps=4)
    _pack_kernel[(B,)](kept, selected_BM, X, M, BLOCK=triton.next_power_of_2(X - 1), num_warps=4)


def build(
    selected_BM: Tensor, drafted: tuple[Tensor, Tensor, Tensor, Tensor], depth: int, outputs: tuple[Tensor, ...]
) -> None:
    """Fill tokens, scores, values, parents, candidates, depths and mask of the tree."""
    B, N = selected_BM.shape[0], selected_BM.shape[1] + 1
    tokens, scores, values, parents, candidate, depths, mask = outputs
    _build_kernel[(B,)](
        selected_BM, *drafted, tokens, scores, values, parents, candidate.view(torch.uint8), depths, mask.view(torch.uint8),
        drafted[0].shape[1], N, depth, BLOCK=max(16, triton.next_power_of_2(N)), num_warps=4 if N <= 64 else 8,
    )  # fmt: skip
