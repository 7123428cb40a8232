"""Operations of a decoding cycle on small tensors: draw tokens, follow them down the tree, commit
the path, Gumbel noise.

The references in torch are core/sampling.py, core/verify.py and core/cache.py; tests compare them
with these.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from eyas.kernels._build import library
from eyas.kernels._linear import ThreadCount, count
from eyas.kernels._records import address, flags, floats, longs

__all__ = ["commit", "draw", "follow", "gumbel"]

SMALL = 2**15  # scores from which one thread draws before others would wake up; noise takes four times as long


def follow(
    tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, draw_BN: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow the draws from the root: a node is accepted if its token was drawn at its parent.
    Siblings have distinct tokens.

    Returns:
        Path of nodes and their tokens, int64 [B, longest], padded with -1 and 0; its length and the
        bonus token, int64 [B].
    """
    B, N = tokens_BN.shape
    tokens, parents, acceptable, draws = (x.contiguous() for x in (tokens_BN, parents_BN, acceptable_BN, draw_BN))
    path_BP, path_tokens_BP, length_B, bonus_B = longs(B, longest), longs(B, longest), longs(B), longs(B)
    matching_siblings = library().eyas_follow(
        *(_integers(tokens), _integers(parents), _flags(acceptable), _integers(draws)),
        *map(c_int64, (B, N, longest)),
        *map(_integers, (path_BP, path_tokens_BP, length_B, bonus_B)),
    )
    assert not matching_siblings, "siblings with the same token; unite them before verification"
    return path_BP, path_tokens_BP, length_B, bonus_B


def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """Move the nodes of each row's path to the slots after its committed ones, in a cache [E, B,
    K, slots, h]."""
    length_B, path_BP = length_B.contiguous(), path_BP.contiguous()
    E, B, K, slots, h = store.shape
    library().eyas_commit(
        c_void_p(address(store, store.dtype)),
        *map(c_int64, (E, B, K, slots, h * store.element_size())),
        _integers(length_B),
        _integers(path_BP),
        c_int64(path_BP.shape[1]),
    )


def gumbel(
    seed_B: Tensor, greedy_B: Tensor, stream: int, position_BN: Tensor, vocab: int | Tensor, threads: ThreadCount = None
) -> Tensor:
    """Return the Gumbel noise of `sampling.GumbelNoise`, float32 [B, N, V]; zero in greedy rows.

    Args:
        vocab: the size of the vocabulary, or the V token ids.
    """
    (B, N), V = position_BN.shape, vocab if isinstance(vocab, int) else len(vocab)
    noise_BNV = floats(B, N, V)
    seed_B, greedy_B, position_BN = (x.contiguous() for x in (seed_B, greedy_B, position_BN))
    ids_V = None if isinstance(vocab, int) else vocab.contiguous()
    library().eyas_gumbel(
        _integers(seed_B),
        _flags(greedy_B),
        c_int64(stream),
        _integers(position_BN),
        c_int64(B),
        c_int64(N),
        _integers(ids_V),
        c_int64(V),
        c_void_p(address(noise_BNV)),
        c_int64(1 if B * N * V <= SMALL // 4 else count(threads)),
    )
    return noise_BNV


def draw(
    scores_BNV: Tensor,
    depth_BN: Tensor,
    acceptable_BN: Tensor,
    position_B: Tensor,
    seed_B: Tensor,
    greedy_B: Tensor,
    stream: int,
    threads: ThreadCount = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token at every acceptable node by the largest score + Gumbel noise; the largest score in greedy
    rows. Other nodes get -1, and their scores are not read.

    The noise is the value that `sampling.GumbelNoise` has for the position after the node. It is computed only
    for tokens that can still win.

    Args:
        depth_BN: the nodes' depths below their roots, which are at `position_B`.

    Returns:
        int64 [B, N] tokens; bool [B]: rows with a NaN score at one of these nodes.
    """
    B, N, V = scores_BNV.shape
    inputs = (scores_BNV, depth_BN, acceptable_BN, seed_B, greedy_B, position_B)
    scores, depth, acceptable, seed, greedy, position = (x.contiguous() for x in inputs)
    drawn_BN, has_nan_B = longs(B, N), flags(B)
    library().eyas_draw(
        *(c_void_p(address(scores)), _integers(depth), _flags(acceptable), _integers(seed), _flags(greedy)),
        *(c_int64(stream), _integers(position)),
        *map(c_int64, (B, N, V)),
        _integers(drawn_BN),
        _flags(has_nan_B),
        c_int64(1 if B * N * V <= SMALL else count(threads)),
    )
    return drawn_BN, has_nan_B


def _integers(tensor: Tensor | None) -> c_void_p:
    return c_void_p(address(tensor, torch.long))


def _flags(tensor: Tensor) -> c_void_p:
    return c_void_p(address(tensor, torch.bool))
