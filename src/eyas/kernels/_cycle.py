"""The noise of a cycle, and its end."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from eyas.kernels import _records
from eyas.kernels._build import library
from eyas.kernels._linear import ThreadCount, count

__all__ = ["commit", "draw", "follow", "gumbel"]

SMALL = 2**15  # scores that one thread draws from before others are awake; noise takes it four times as long


def follow(
    tokens_BN: Tensor, parents_BN: Tensor, candidate_BN: Tensor, draw_BN: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Path and tokens [B, longest], length and bonus [B] of the path that follows the draws; all int64. Siblings have distinct tokens."""
    B, N = tokens_BN.shape
    given = tuple(x.contiguous() for x in (tokens_BN, parents_BN, candidate_BN, draw_BN))
    path_BP, tokens_BP = torch.empty(2, B, longest, dtype=torch.long)
    length_B, bonus_B = torch.empty(2, B, dtype=torch.long)
    twins = library().eyas_follow(
        *(c_void_p(x.data_ptr()) for x in given), c_int64(B), c_int64(N), c_int64(longest),
        *(c_void_p(x.data_ptr()) for x in (path_BP, tokens_BP, length_B, bonus_B)),
    )  # fmt: skip
    assert not twins, "siblings with the same token; unite them before verification"
    return path_BP, tokens_BP, length_B, bonus_B


def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """Move the nodes of each row's path to the slots behind its committed ones, in a cache [E, B, K, slots, h] of float32."""
    E, B, K, slots, h = store.shape
    length_B, path_BP = length_B.contiguous(), path_BP.contiguous()
    library().eyas_commit(
        c_void_p(store.data_ptr()), *map(c_int64, (E, B, K, slots, h)), c_void_p(length_B.data_ptr()), c_void_p(path_BP.data_ptr()),
        c_int64(path_BP.shape[1]),
    )  # fmt: skip


def gumbel(seed_B: Tensor, greedy_B: Tensor, stream: int, position_BN: Tensor, vocab: int | Tensor, threads: ThreadCount = None) -> Tensor:
    """float32 [B, N, V]: what `sampling.GumbelNoise` says of these positions and tokens (how many, or their ids); zero in greedy rows."""
    (B, N), V = position_BN.shape, vocab if isinstance(vocab, int) else len(vocab)
    noise_BNV = torch.empty(B, N, V)
    given = tuple(x.contiguous() for x in (seed_B, greedy_B, position_BN))
    seed, greedy, position = (c_void_p(x.data_ptr()) for x in given)
    ids = None if isinstance(vocab, int) else vocab.contiguous()
    library().eyas_gumbel(
        seed, greedy, c_int64(stream), position, c_int64(B), c_int64(N), c_void_p(_records.at(ids)), c_int64(V),
        c_void_p(noise_BNV.data_ptr()), c_int64(1 if B * N * V <= SMALL // 4 else count(threads)),
    )  # fmt: skip
    return noise_BNV


def draw(
    scores_BNV: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor, greedy_B: Tensor, stream: int, threads: ThreadCount = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw a token at every node by the largest score + Gumbel noise; the largest score in greedy rows.

    The noise is that of `sampling.GumbelNoise` for the position behind the node. It is computed only for tokens that can still win.

    Args:
        depth_BN: the nodes' depths below their roots, which stand at `position_B`.

    Returns:
        int64 [B, N] tokens; bool [B]: rows with a NaN score.
    """
    B, N, V = scores_BNV.shape
    given = tuple(x.contiguous() for x in (scores_BNV, depth_BN, seed_B, greedy_B, position_B))
    drawn_BN, broken_B = torch.empty(B, N, dtype=torch.long), torch.empty(B, dtype=torch.bool)
    scores, depth, seed, greedy, position = (c_void_p(x.data_ptr()) for x in given)
    library().eyas_draw(
        scores, depth, seed, greedy, c_int64(stream), position, *map(c_int64, (B, N, V)), c_void_p(drawn_BN.data_ptr()),
        c_void_p(broken_B.data_ptr()), c_int64(1 if B * N * V <= SMALL else count(threads)),
    )  # fmt: skip
    return drawn_BN, broken_B
