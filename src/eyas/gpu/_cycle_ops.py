"""The GPU kernels of drafts and verification as operators of torch. On a CPU the reference in
`core` and `drafters` runs instead.
Letters: B rows, N nodes, P nodes on the longest path, V vocabulary, v that of
the draft, Q nodes of a level, K children of each, X all drafted nodes and the root, M nodes without
the root, T nodes in slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eyas.gpu import _ops
from eyas.gpu._ops import operator

__all__ = [
    "KERNELS",
    "best_children",
    "build_tree",
    "choose",
    "commit",
    "draw",
    "filtered",
    "given_path",
    "grow_step",
    "keep_best",
]

KERNELS = {
    "draw": 2,
    "choose": 2,
    "best_children": 2,
    "keep_best": 2,
    "fixed_attention": 2,
}  # operators of more than one kernel


@operator("cycle")
def draw(
    scores_BNV: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor, greedy_B: Tensor, noisy: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the largest score + noise at each node, int64 [B, N]; which nodes have NaN among their
    scores. noisy: not all rows are greedy."""
    shape = scores_BNV.shape[:2]
    return scores_BNV.new_empty(shape, dtype=torch.int64), scores_BNV.new_empty(shape, dtype=torch.bool)


@operator(lambda *x: _ops.kernels("cycle").choose(*x[:-2], x[-1]))
def choose(
    scores_BNV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, seed_B: Tensor,
    greedy_B: Tensor, noisy: bool, longest: int,
) -> Tensor:  # fmt: skip
    """`draw` at every node, then the path of the nodes that were drawn at their parents:
    `core.cycle.Cycle.host_result_BX`."""
    return tokens_BN.new_empty(tokens_BN.shape[0], 3 + 2 * longest)


@operator("cycle")
def given_path(
    tokens_BN: Tensor, parents_BN: Tensor, acceptable_BN: Tensor, depth_BN: Tensor, position_B: Tensor, bonus_B: Tensor, has_nan_B: Tensor,
    rates_D: Tensor, seed: int, stride: int,
) -> Tensor:  # fmt: skip
    """Return the path to a deepest candidate, cut where a test with the rate of its depth fails, as
    `Cycle.host_result_BX` (`eyas_lab.bench.simulate`)."""
    return tokens_BN.new_empty(tokens_BN.shape[0], 5 + 2 * rates_D.shape[0])


@operator("score")
def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Steps 6 to 9 of `core.sampling.apply_sampling`: float32 scores, -inf for excluded tokens."""
    return logits.new_empty(logits.shape, dtype=torch.float32)


@operator("cycle", changes=("store",))
def commit(store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
    """See `core.cache.commit_path`."""
    return


def _best_children(logits_BQv: Tensor, ids_v: Tensor | None, seed_B: Tensor, *rest: Any) -> None:
    *settings, _, index, log_q, log_confidence = rest
    ids = seed_B if ids_v is None else ids_v  # a kernel needs some tensor there
    _ops.kernels("growth").best_children(
        logits_BQv, ids, ids_v is not None, seed_B, *settings, index, log_q, log_confidence
    )


@operator(_best_children)
def best_children(
    logits_BQv: Tensor, ids_v: Tensor | None, seed_B: Tensor, greedy_B: Tensor, position_B: Tensor, level: int, temperature: float,
    confidence_temperature: float, noisy: bool, coupled: bool, branch: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the best `branch` tokens of each node, [B, Q, K]: indices in the draft vocabulary, log
    q, log of the confidence."""
    shape = (*logits_BQv.shape[:2], branch)
    floats = [logits_BQv.new_empty(shape, dtype=torch.float32) for _ in range(2)]
    return logits_BQv.new_empty(shape, dtype=torch.int64), floats[0], floats[1]


def _grow_step(*x: Any) -> None:
    children, ids_v, level, tree, (root_tokens_B, *settings), results = x[:3], x[3], x[4:7], x[7:11], x[11:15], x[15:]
    _ops.kernels("growth").step(
        children,
        root_tokens_B if ids_v is None else ids_v,
        ids_v is not None,
        level,
        tree,
        root_tokens_B,
        *settings,
        results,
    )


@operator(_grow_step, changes=("tokens_BX", "log_q_BX", "value_BX", "parents_BX"))
def grow_step(
    index_BQK: Tensor, log_q_BQK: Tensor, log_confidence_BQK: Tensor, ids_v: Tensor | None, value_BQ: Tensor, number_BQ: Tensor,
    visible_BQT: Tensor, tokens_BX: Tensor, log_q_BX: Tensor, value_BX: Tensor, parents_BX: Tensor, root_tokens_B: Tensor,
    first: int, log_stop: float, by_value: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Write the children of a level's nodes down as the drafted nodes `first` and following, and
    choose the next level's nodes.

    Args:
        value_BQ, number_BQ, visible_BQT: values, numbers and masks of the level's nodes; they are
            not read at the first level (first = 1).

    Returns:
        The next level's K nodes: tokens, values, numbers, which of the Q nodes their parents are
        (all [B, K]), and masks [B, K, T + K].
    """
    B, _, K = index_BQK.shape
    token, number, parent = (index_BQK.new_empty(B, K) for _ in range(3))
    seen = visible_BQT.new_empty(B, K, visible_BQT.shape[2] + K)
    return token, log_q_BQK.new_empty(B, K), number, parent, seen


@operator(lambda value_BX, _, keep: _ops.kernels("growth").keep_best(value_BX, keep))
def keep_best(value_BX: Tensor, most: int) -> Tensor:
    """Return the numbers [B, most] of the drafted nodes of the highest values, ascending; ties go
    to the earlier node. The root is not one."""
    return value_BX.new_empty(value_BX.shape[0], most, dtype=torch.int64)


@operator(lambda selected, *x: _ops.kernels("growth").build(selected, x[:4], x[4], x[5:]))
def build_tree(
    selected_BM: Tensor, tokens_BX: Tensor, log_q_BX: Tensor, value_BX: Tensor, parents_BX: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the tree of the root and the kept nodes: tokens, log q, values, parents, candidates,
    depths [B, N], mask [B, N, N]."""
    B, N = selected_BM.shape[0], selected_BM.shape[1] + 1
    tokens, parents, depths = (selected_BM.new_empty(B, N) for _ in range(3))
    log_q, values = (value_BX.new_empty(B, N) for _ in range(2))
    candidate, mask = selected_BM.new_empty(B, N, dtype=torch.bool), selected_BM.new_empty(B, N, N, dtype=torch.bool)
    return tokens, log_q, values, parents, candidate, depths, mask
