"""How trees grow from a draft net: level by level, a static shape or a dynamic one.

Both are given `Growth`: the state after the net has read everything committed, and `expand`, one forward of the net over a level's nodes.
A level's nodes attend to the committed slots and to the levels' slots that `visible` names: their ancestors and themselves.

Letters: B rows, Q nodes of a level, T nodes of all levels so far, K branch, N nodes of the final tree, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafters._base import Roots
from eyas.errors import OptionError
from eyas.sampling import Noise, law, process
from eyas.tree import Choices, Draft, Tree

__all__ = ["DynamicTree", "Growth", "grow_dynamic", "grow_static"]


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: expand the most probable nodes, then keep the best of all."""

    nodes: int = 60  # verified per cycle, the root included
    depth: int = 8  # most draft tokens on a path
    branch: int = 10  # nodes expanded per level, and children of each

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "branch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"tree.{name} must be a whole number, 1 or more, got {value!r}")

    def describe(self) -> dict[str, Any]:
        return {"kind": "dynamic", "nodes": self.nodes, "depth": self.depth, "branch": self.branch}


@dataclass(frozen=True)
class Growth:
    """What growing starts from."""

    hidden_BD: Tensor  # the net's output at the newest committed slot: predicted feature of the root
    head: Callable[[Tensor], Tensor]  # [..., D] -> logits [..., V]
    expand: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (tokens_BQ, features_BQD, visible_BQT, level) -> hidden_BQD
    draft_ids_v: Tensor | None = None  # the target's ids of the draft vocabulary, where the head speaks a smaller one

    def ids(self, draft: Tensor) -> Tensor:
        """The head's token ids -> the target's."""
        return draft if self.draft_ids_v is None else self.draft_ids_v[draft]


def _log_q(logits: Tensor) -> Tensor:
    """log softmax in float32; at most 0, so that no child scores above its parent; NaN counts as impossible."""
    return logits.float().log_softmax(-1).nan_to_num(nan=-math.inf).clamp(max=0.0)


def _best(score_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest with their indices; ties go to the smaller index."""
    values_BX, index_BX = score_BX.sort(dim=-1, descending=True, stable=True)
    return values_BX[:, :count], index_BX[:, :count]


def grow_dynamic(growth: Growth, roots: Roots, shape: DynamicTree) -> Draft:
    """EAGLE-2 (seed paper, section 4): expansion by joint confidence, then reranking of everything that was drafted.

    A node's score is the product of the draft's probabilities along its path. At every level the `branch` best new nodes are expanded into
    `branch` children each; at the end the `nodes - 1` best of all are kept. Ties: by score, then shallower, then in order of drafting.
    """
    B, device = roots.tokens_B.shape[0], roots.tokens_B.device
    logq_BV = _log_q(growth.head(growth.hidden_BD))
    K = min(shape.branch, logq_BV.shape[-1])
    own_BK, best_BK = logq_BV.topk(K)
    beam_tokens_BK = growth.ids(best_BK)
    beam_score_BK, beam_index_BK = own_BK, torch.arange(K, device=device).expand(B, K)
    features_BKD = growth.hidden_BD[:, None].expand(-1, K, -1)
    visible_BKT = torch.eye(K, dtype=torch.bool, device=device).expand(B, K, K)
    # everything drafted, in order of drafting: token, log q, score, and the parent's place in these lists (-1 = the root)
    tokens, owns, scores, parents = [beam_tokens_BK], [own_BK], [beam_score_BK], [torch.full_like(beam_tokens_BK, -1)]
    drafted = K
    for level in range(shape.depth - 1):
        hidden_BKD = growth.expand(beam_tokens_BK, features_BKD, visible_BKT, level)
        own_BKK, best_BKK = _log_q(growth.head(hidden_BKD)).topk(K)
        score_BX = (beam_score_BK[..., None] + own_BKK).flatten(1)
        tokens.append(growth.ids(best_BKK).flatten(1))
        owns.append(own_BKK.flatten(1))
        scores.append(score_BX)
        parents.append(beam_index_BK.repeat_interleave(K, dim=1))
        if level == shape.depth - 2:
            break
        beam_score_BK, pick_BK = _best(score_BX, K)
        row_BK = pick_BK // K
        beam_index_BK, beam_tokens_BK = drafted + pick_BK, tokens[-1].gather(1, pick_BK)
        features_BKD = hidden_BKD.gather(1, row_BK[..., None].expand_as(hidden_BKD))
        kept_BKT = visible_BKT.gather(1, row_BK[..., None].expand_as(visible_BKT))
        visible_BKT = torch.cat([kept_BKT, torch.eye(K, dtype=torch.bool, device=device).expand(B, K, K)], dim=-1)
        drafted += K * K
    return _rerank(roots, shape, *(torch.cat(x, dim=1) for x in (tokens, owns, scores, parents)))


def _rerank(roots: Roots, shape: DynamicTree, tokens_BX: Tensor, own_BX: Tensor, score_BX: Tensor, parent_BX: Tensor) -> Draft:
    """Keep the best `nodes - 1`. A parent scores no less than its child and was drafted earlier, so it is kept whenever its child is."""
    keep_BM = _best(score_BX, min(shape.nodes - 1, score_BX.shape[1]))[1].sort(dim=-1).values
    number_M = torch.arange(1, keep_BM.shape[1] + 1, device=keep_BM.device)
    place_BX = torch.zeros_like(parent_BX).scatter(1, keep_BM, number_M.expand_as(keep_BM))
    parent_BM = parent_BX.gather(1, keep_BM)
    parent_BM = torch.where(parent_BM < 0, 0, place_BX.gather(1, parent_BM.clamp(min=0)))

    def with_root(root_B: Tensor, rest_BM: Tensor) -> Tensor:
        return torch.cat([root_B[:, None], rest_BM], dim=1)

    candidate_BM = score_BX.gather(1, keep_BM) > -math.inf
    tree = Tree.build(
        with_root(torch.full_like(roots.tokens_B, -1), parent_BM), shape.depth, with_root(torch.ones_like(roots.active_B), candidate_BM)
    )
    score_BN = with_root(torch.zeros_like(own_BX[:, 0]), own_BX.gather(1, keep_BM))
    return Draft(tree, with_root(roots.tokens_B, tokens_BX.gather(1, keep_BM)), score_BN)


@dataclass(frozen=True)
class _Level:
    """One level's nodes that have children, in node order."""

    inner: list[int]  # node numbers
    width: int  # most children of any of them
    children: list[tuple[int, int, int]]  # (place among inner, rank, node number of the child)


def _levels(choices: Choices) -> tuple[list[int], list[_Level]]:
    """Parents of all nodes (root included), and the levels that must be expanded."""
    number = {path: n for n, path in enumerate(choices, start=1)}
    number[()] = 0
    parents = [-1, *(number[path[:-1]] for path in choices)]
    by_depth: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for path in choices:
        by_depth[len(path)].append(path)
    levels = []
    for depth in sorted(by_depth):
        inner = sorted({number[path[:-1]] for path in by_depth[depth]})
        children = [(inner.index(number[path[:-1]]), path[-1], number[path]) for path in by_depth[depth]]
        levels.append(_Level(inner, 1 + max(rank for _, rank, _ in children), children))
    return parents, levels


def grow_static(growth: Growth, roots: Roots, choices: Choices) -> Draft:
    """EAGLE-1's tree of fixed shape: a node's children are the draft's best tokens (greedy rows) or are drawn from q without replacement.

    Drawing: the largest log q + Gumbel noise (Kool, van Hoof, Welling 2019), q processed by the row's own Sampling like p, with noise of
    the draft's own. Siblings stay in draw order. A node that q gives no mass is no candidate.
    """
    B, device = roots.tokens_B.shape[0], roots.tokens_B.device
    parents, levels = _levels(choices)
    N, depth = len(parents), len(levels)
    shape = Tree.build(torch.tensor([parents], device=device).expand(B, N), depth)
    tokens_BN = torch.zeros(B, N, dtype=torch.long, device=device)
    tokens_BN[:, 0] = roots.tokens_B
    score_BN = torch.zeros(B, N, device=device)
    candidate_BN = torch.ones(B, N, dtype=torch.bool, device=device)
    q_BNV: Tensor | None = None
    hidden_BND = growth.hidden_BD[:, None].repeat(1, N, 1)  # at each node: the net's output there, i.e. the predicted feature
    slot_of: dict[int, int] = {}  # inner node -> its slot among the levels' nodes
    for level, plan in enumerate(levels):
        if level:
            slot_of.update({n: len(slot_of) + i for i, n in enumerate(plan.inner)})
            visible_BQT = shape.mask_BNN[:, plan.inner][:, :, list(slot_of)]
            parent_of = [parents[n] for n in plan.inner]
            hidden_BND[:, plan.inner] = growth.expand(tokens_BN[:, plan.inner], hidden_BND[:, parent_of], visible_BQT, level - 1)
        scores_BQV = _processed(growth.head(hidden_BND[:, plan.inner]), roots, shape, tokens_BN, plan.inner)
        key_BQV = scores_BQV
        if not roots.noise.all_greedy:
            place_BQ = roots.position_B[:, None] * N + torch.tensor(plan.inner, device=device)  # every node draws with noise of its own
            q_BQV = law(scores_BQV, greedy=False)  # drawn from this very law, as rounded, so that verification knows what was done
            key_BQV = torch.where(roots.noise.greedy_B[:, None, None], scores_BQV, q_BQV.log())
            key_BQV = key_BQV + roots.noise.gumbel(place_BQ, scores_BQV.shape[-1], Noise.DRAFT)
            q_BNV = torch.zeros(B, N, scores_BQV.shape[-1], device=device) if q_BNV is None else q_BNV
            q_BNV[:, plan.inner] = q_BQV
        key_BQK, token_BQK = key_BQV.topk(plan.width)
        own_BQK = _log_q(scores_BQV).gather(-1, token_BQK)
        for place, rank, node in plan.children:
            tokens_BN[:, node] = token_BQK[:, place, rank]
            score_BN[:, node] = own_BQK[:, place, rank]
            candidate_BN[:, node] = key_BQK[:, place, rank] > -math.inf
    tree = Tree(shape.parents_BN, candidate_BN, shape.depth_BN, shape.mask_BNN, depth)
    return Draft(tree, tokens_BN, score_BN, q_BNV)


def _processed(logits_BQV: Tensor, roots: Roots, shape: Tree, tokens_BN: Tensor, inner: list[int]) -> Tensor:
    """The draft's scores after each row's own Sampling, with the prefix of each node."""
    seen_BNV = None if roots.history_BV is None else shape.seen(tokens_BN, roots.history_BV)[:, inner]
    rows = enumerate(roots.sampling)
    return torch.stack([process(logits_BQV[b], s, None if seen_BNV is None else seen_BNV[b]) for b, s in rows])
