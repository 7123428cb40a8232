"""Triton kernels of verification: draws with Gumbel noise, the accepted path, its commit.
`core.ops` and `core.sampling` are the reference.

This module is imported on GPUs and by tests with Triton's interpreter only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["choose", "commit", "draw", "given_path"]

BLOCK_V = 2048  # tokens of the vocabulary that one program reads


@triton.jit
def mix(x):
    """SplitMix64's finaliser on int64 words, as in `core.sampling`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(seed, stream, position, index):
    """float64 inside (0, 1), from 52 random bits, as `GumbelNoise._uniform`."""
    key = mix(mix(mix(seed + -7046029254386353131) + stream) + (position + 1) * -7046029254386353131)
    bits = (mix(key + (index + 1) * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    return (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def gumbel(seed, stream, position, token):
    """float32: the Gumbel variable of a token at a position, in float64 as `GumbelNoise.gumbel`."""
    return (-tl.log(-tl.log(uniform(seed, stream, position, token)))).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def _draw_parts_kernel(
    scores, depth, position, seed, greedy, best, token, broken, N, V, parts, NOISY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the largest score + noise among one block of the vocabulary, at one node."""
    node, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = node // N
    token_V = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = token_V < V
    score_V = tl.load(scores + node * V + token_V, mask=inside, other=float("-inf"))
    is_nan_V = score_V != score_V
    key_V = tl.where(is_nan_V, float("-inf"), score_V).to(tl.float64)
    if NOISY:
        if tl.load(greedy + row) == 0:
            at = tl.load(position + row) + tl.load(depth + node) + 1
            key_V = key_V + gumbel(tl.load(seed + row), 0, at, token_V).to(tl.float64)
    top = tl.max(key_V, 0)
    tl.store(best + node * parts + part, top)
    tl.store(token + node * parts + part, tl.min(tl.where(inside & (key_V == top), token_V, V), 0))
    tl.store(broken + node * parts + part, tl.max(is_nan_V.to(tl.int32), 0))


@triton.jit
def _draw_merge_kernel(best, token, broken, drawn, is_broken, parts, BLOCK: tl.constexpr):
    """One node: the best of its blocks' tokens, and whether any score is NaN."""
    node, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = p < parts
    key_P = tl.load(best + node * parts + p, mask=inside, other=float("-inf"))
    token_P = tl.load(token + node * parts + p, mask=inside, other=2**62)
    tl.store(drawn + node, tl.min(tl.where(key_P == tl.max(key_P, 0), token_P, 2**62), 0))
    tl.store(is_broken + node, tl.max(tl.load(broken + node * parts + p, mask=inside, other=0), 0) != 0)


@triton.jit
def _store_node(columns, P, depth, node, token):
    """A node of the path; -1: the path has ended."""
    tl.store(columns + 3 + depth, tl.where(node >= 0, token, 0))
    tl.store(columns + 3 + P + depth, node.to(tl.int64))


@triton.jit(do_not_specialize=["N", "P", "parts"])
def _choose_kernel(
    best, token, broken, tokens, parents, candidate, columns, N, P, parts, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """One row: the draws of all parts, then the path from the root to the child that was drawn, as
    long as there is one."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < N
    top_N, drawn_N = tl.full([BLOCK], float("-inf"), tl.float64), tl.full([BLOCK], 2**62, tl.int64)
    broken_N = tl.zeros([BLOCK], tl.int32)
    for start in range(0, parts, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at, there = (row * N + n)[:, None] * parts + p[None, :], inside[:, None] & (p < parts)[None, :]
        key_NP = tl.load(best + at, mask=there, other=float("-inf"))
        token_NP = tl.load(token + at, mask=there, other=2**62)
        broken_N = tl.maximum(broken_N, tl.max(tl.load(broken + at, mask=there, other=0), 1))
        part_top_N = tl.max(key_NP, 1)
        part_N = tl.min(tl.where(key_NP == part_top_N[:, None], token_NP, 2**62), 1)
        tie_N = tl.where(part_top_N == top_N, tl.minimum(part_N, drawn_N), drawn_N)
        drawn_N = tl.where(part_top_N > top_N, part_N, tie_N)
        top_N = tl.maximum(top_N, part_top_N)
    token_N = tl.load(tokens + row * N + n, mask=inside, other=-1)
    parent_N = tl.load(parents + row * N + n, mask=inside, other=-2)
    eligible_N = inside & (tl.load(candidate + row * N + n, mask=inside, other=0) != 0)
    columns += row * (3 + 2 * P)
    node, count = tl.full([], 0, tl.int32), tl.full([], 1, tl.int64)
    _store_node(columns, P, 0, node, tl.load(tokens + row * N))
    drawn = tl.sum(tl.where(n == 0, drawn_N, 0), 0)
    for depth in range(1, P):
        hit_N = eligible_N & (parent_N == node) & (token_N == drawn) & (count == depth)
        child = tl.max(tl.where(hit_N, n, -1), 0)
        _store_node(columns, P, depth, child, drawn)
        count += (child >= 0).to(tl.int64)
        node = tl.where(child >= 0, child, node)
        drawn = tl.sum(tl.where(n == node, drawn_N, 0), 0)
    tl.store(columns, count)
    tl.store(columns + 1, drawn)
    tl.store(columns + 2, (tl.max(broken_N, 0) != 0).to(tl.int64))


@triton.jit(do_not_specialize=["N", "P"])
def _given_path_kernel(
    tokens, parents, candidate, depth, position, bonus, broken, rates, columns, N, P, seed, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: see `eyas_lab.bench.simulate`."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < N
    depth_N = tl.load(depth + row * N + n, mask=inside, other=-1)
    depth_N = tl.where(inside & (tl.load(candidate + row * N + n, mask=inside, other=0) != 0), depth_N, -1)
    deepest = tl.max(depth_N, 0)
    node = tl.min(tl.where(depth_N == deepest, n, BLOCK), 0)
    root = tl.load(tokens + row * N)
    key, accepted = tl.load(position + row) + stride * root, tl.full([], 0, tl.int64)
    for test in range(0, P - 1):
        passes = uniform(tl.full([], 0, tl.int64) + seed, 1, key, tl.full([], 0, tl.int64) + test) < tl.load(
            rates + test
        )
        accepted += (passes & (accepted == test)).to(tl.int64)
    length = tl.minimum(accepted, deepest) + 1
    columns += row * (3 + 2 * P)
    for at in range(0, P):
        if at >= length:
            _store_node(columns, P, at, tl.full([], -1, tl.int32), root)
    for _ in range(0, P):
        here = tl.load(depth + row * N + node)
        if here < length:
            _store_node(columns, P, here, node, tl.load(tokens + row * N + node))
        node = tl.maximum(tl.load(parents + row * N + node), 0).to(tl.int32)
    tl.store(columns, length)
    tl.store(columns + 1, tl.load(bonus + row))
    tl.store(columns + 2, (tl.load(broken + row) != 0).to(tl.int64))


@triton.jit(do_not_specialize=["P"])
def _commit_kernel(store, length, path, P, p_b, s_e, s_b, s_k, s_s, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one row: each node of the path moves to its place, never onto one that is still
    to be read, as path[i] >= i rises."""
    entry, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    w = tl.arange(0, BLOCK)
    base = store + entry * s_e + row * s_b + head * s_k + tl.load(length + row) * s_s + w
    for depth in range(1, P):
        node = tl.load(path + row * p_b + depth)
        if node > depth:
            tl.store(base + depth * s_s, tl.load(base + node * s_s, mask=w < WIDTH), mask=w < WIDTH)


def draw(
    scores_BNV: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor, greedy_B: Tensor, noisy: bool,
    drawn_BN: Tensor, has_nan_BN: Tensor,
) -> None:  # fmt: skip
    """Fill the drawn tokens, and which nodes have NaN among their scores. The sum of score and
    noise is taken in float64."""
    best, token, broken = _draw_parts(scores_BNV, depth_BN, position_B, seed_B, greedy_B, noisy)
    nodes, parts = best.shape
    _draw_merge_kernel[(nodes,)](
        best, token, broken, drawn_BN, has_nan_BN.view(torch.uint8), parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )  # fmt: skip


def choose(
    scores_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor,
    greedy_B: Tensor, noisy: bool, host_result_BX: Tensor,
) -> None:  # fmt: skip
    """Fill the columns of the verdict (`core.cycle.Cycle.host_result_BX`) of deterministic trees."""
    best, token, broken = _draw_parts(scores_BNV, depth_BN, position_B, seed_B, greedy_B, noisy)
    (B, N), P = tokens_BN.shape, (host_result_BX.shape[1] - 3) // 2
    _choose_kernel[(B,)](
        best, token, broken, tokens_BN.contiguous(), parents_BN.contiguous(), acceptable_BN.contiguous().view(torch.uint8), host_result_BX,
        N, P, best.shape[1], BLOCK=max(16, triton.next_power_of_2(N)), BLOCK_P=16, num_warps=4,
    )  # fmt: skip


def _draw_parts(
    scores_BNV: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor, greedy_B: Tensor, noisy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """For each node and each block of the vocabulary the largest score + noise, its token, and
    whether there is NaN: [nodes, parts]."""
    B, N, V = scores_BNV.shape
    parts = triton.cdiv(V, BLOCK_V)
    best = scores_BNV.new_empty((B * N, parts), dtype=torch.float64)
    token, broken = torch.empty_like(best, dtype=torch.int64), torch.empty_like(best, dtype=torch.int32)
    _draw_parts_kernel[(B * N, parts)](
        scores_BNV.contiguous(), depth_BN.contiguous(), position_B, seed_B, greedy_B.view(torch.uint8), best, token, broken, N, V, parts,
        NOISY=noisy, BLOCK=min(BLOCK_V, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    return best, token, broken


def given_path(
    tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, bonus_B: Tensor, has_nan_B: Tensor,
    rates_D: Tensor, seed: int, stride: int, host_result_BX: Tensor,
) -> None:  # fmt: skip
    """Fill the columns of a path that is accepted at given rates (`eyas_lab.bench.simulate`)."""
    B, N = tokens_BN.shape
    _given_path_kernel[(B,)](
        tokens_BN.contiguous(), parents_BN.contiguous(), acceptable_BN.contiguous().view(torch.uint8), depth_BN.contiguous(), position_B,
        bonus_B.contiguous(), has_nan_B.contiguous(), rates_D, host_result_BX, N, rates_D.shape[0] + 1, seed, stride,
        BLOCK=max(16, triton.next_power_of_2(N)), num_warps=1,
    )  # fmt: skip


def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """See `core.cache.commit_path`."""
    E, B, K, _, width = store.shape
    assert store.stride(4) == path_BP.stride(1) == 1, "heads and paths are contiguous"
    _commit_kernel[(E, B, K)](
        store, length_B, path_BP, path_BP.shape[1], path_BP.stride(0), *store.stride()[:4],
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
