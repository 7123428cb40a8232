"""Triton kernels of verification: draws with Gumbel noise, the accepted path, its commit. `core.ops` and `core.sampling` are the reference.

This module is imported on GPUs and by tests with Triton's interpreter only. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["commit", "draw", "follow", "gumbel"]

BLOCK_V = 2048  # tokens of the vocabulary that one program reads


@triton.jit
def mix(x):
    """SplitMix64's finaliser on int64 words, as in `core.sampling`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def gumbel(seed, stream, position, token):
    """float32: the Gumbel variable of a token at a position, from 52 random bits, in float64 as `GumbelNoise.gumbel`."""
    key = mix(mix(mix(seed + -7046029254386353131) + stream) + (position + 1) * -7046029254386353131)
    bits = (mix(key + (token + 1) * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def _draw_parts_kernel(
    scores, depth, position, seed, greedy, best, token, broken, N, V, parts, NOISY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest score + noise among one block of the vocabulary, at one node."""
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
    node, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = p < parts
    key_P = tl.load(best + node * parts + p, mask=inside, other=float("-inf"))
    token_P = tl.load(token + node * parts + p, mask=inside, other=2**62)
    tl.store(drawn + node, tl.min(tl.where(key_P == tl.max(key_P, 0), token_P, 2**62), 0))
    tl.store(is_broken + node, tl.max(tl.load(broken + node * parts + p, mask=inside, other=0), 0) != 0)


@triton.jit(do_not_specialize=["N", "P"])
def _follow_kernel(tokens, parents, candidate, draw, path, path_tokens, length, bonus, N, P, BLOCK: tl.constexpr):
    """One row's path: from the root to the child that was drawn, as long as there is one."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < N
    token_N = tl.load(tokens + row * N + n, mask=inside, other=-1)
    parent_N = tl.load(parents + row * N + n, mask=inside, other=-2)
    eligible_N = inside & (tl.load(candidate + row * N + n, mask=inside, other=0) != 0)
    node, count = tl.full([], 0, tl.int32), tl.full([], 1, tl.int64)
    tl.store(path + row * P, 0)
    tl.store(path_tokens + row * P, tl.load(tokens + row * N))
    for depth in range(1, P):
        drawn = tl.load(draw + row * N + node)
        hit_N = eligible_N & (parent_N == node) & (token_N == drawn) & (count == depth)
        child = tl.max(tl.where(hit_N, n, -1), 0)
        tl.store(path + row * P + depth, child)
        tl.store(path_tokens + row * P + depth, tl.where(child >= 0, drawn, 0))
        count += (child >= 0).to(tl.int64)
        node = tl.where(child >= 0, child, node)
    tl.store(length + row, count)
    tl.store(bonus + row, tl.load(draw + row * N + node))


@triton.jit(do_not_specialize=["P"])
def _commit_kernel(store, length, path, P, s_e, s_b, s_k, s_s, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one row: each node of the path moves to its place, never onto one that is still to be read, as path[i] >= i rises."""
    entry, row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    w = tl.arange(0, BLOCK)
    base = store + entry * s_e + row * s_b + head * s_k + tl.load(length + row) * s_s + w
    for depth in range(1, P):
        node = tl.load(path + row * P + depth)
        if node > depth:
            tl.store(base + depth * s_s, tl.load(base + node * s_s, mask=w < WIDTH), mask=w < WIDTH)


def draw(
    scores_BNV: Tensor,
    depth_BN: Tensor,
    position_B: Tensor,
    seed_B: Tensor,
    greedy_B: Tensor,
    noisy: bool,
    drawn_BN: Tensor,
    broken_BN: Tensor,
) -> None:
    """Fill the drawn tokens, and which nodes have NaN among their scores. The sum of score and noise is taken in float64."""
    B, N, V = scores_BNV.shape
    parts = triton.cdiv(V, BLOCK_V)
    best = scores_BNV.new_empty((B * N, parts), dtype=torch.float64)
    token, broken = torch.empty_like(best, dtype=torch.int64), torch.empty_like(best, dtype=torch.int32)
    _draw_parts_kernel[(B * N, parts)](
        scores_BNV.contiguous(), depth_BN.contiguous(), position_B, seed_B, greedy_B.view(torch.uint8), best, token, broken, N, V, parts,
        NOISY=noisy, BLOCK=min(BLOCK_V, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    _draw_merge_kernel[(B * N,)](
        best, token, broken, drawn_BN, broken_BN.view(torch.uint8), parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )  # fmt: skip


def follow(
    tokens_BN: Tensor, parents_BN: Tensor, candidate_BN: Tensor, draw_BN: Tensor, path_BP: Tensor, tokens_BP: Tensor, length_B: Tensor,
    bonus_B: Tensor,
) -> None:  # fmt: skip
    B, N = tokens_BN.shape
    _follow_kernel[(B,)](
        tokens_BN.contiguous(), parents_BN.contiguous(), candidate_BN.contiguous().view(torch.uint8), draw_BN.contiguous(),
        path_BP, tokens_BP, length_B, bonus_B, N, path_BP.shape[1], BLOCK=triton.next_power_of_2(N), num_warps=1,
    )  # fmt: skip


def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """See `core.cache.commit_path`."""
    E, B, K, _, width = store.shape
    assert store.stride(4) == 1, "heads lie in one piece"
    _commit_kernel[(E, B, K)](
        store, length_B, path_BP.contiguous(), path_BP.shape[1], *store.stride()[:4],
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
