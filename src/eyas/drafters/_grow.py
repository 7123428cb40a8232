"""How trees grow from a draft net: level by level, a static shape or a dynamic one.

Both are given `Growth`: the state after the net has read everything committed, and `expand`, one forward of the net over a level's nodes.
A level's nodes attend to the committed slots and to the levels' slots that `visible` names: their ancestors and themselves.

Shared noise. The target draws argmax(log p + g), where the noise g of a (seed, position, token) is known beforehand, and what it draws does
not depend on the tree (sampling.py). So a draft may rank its children by log q + g, with q processed by the row's own Sampling like p: it
guesses what this very run will draw (drafter-invariant coupling: Daliri, Musco, Suresh 2024; with K children here). Greedy rows are the
case g = 0.

Sharpness. What is drawn is certain, so how likely a child is the drawn token is a matter of the gaps between the scores and of how far
log q may be from log p: softmax(sharpness * (log q + g)), which is exact if those errors are Gumbel variables of scale 1 / sharpness.
q itself, EAGLE-2's choice (sharpness 1), is how likely a token is to be sampled by somebody whose noise is not known.

Letters: B rows, Q nodes of a level, T nodes of all levels so far, K branch, X everything drafted, N nodes of the final tree (M without the
root), L levels, D hidden, V vocabulary of the target, v that of the draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, Shape
from eyas.core.sampling import GumbelNoise, apply_sampling_rows, probs
from eyas.core.tree import Choices, Draft, FullDraft, Tree
from eyas.errors import OptionError, near

__all__ = ["DynamicTree", "Growth", "grow_dynamic", "grow_static"]

NOISES, EXPANSIONS = ("shared", "none"), ("value", "confidence")


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree: expand the most probable nodes, then keep the best of all."""

    nodes: int = 60
    """Verified per cycle, the root included."""
    depth: int = 8
    """Most draft tokens on a path."""
    branch: int = 10
    """Nodes expanded per level, and children of each."""
    noise: str = "shared"
    """sampling: rank children by what this run will draw (shared: the target's own noise), or by q
    alone (none)."""
    expand: str = "value"
    """Which nodes are expanded: best by value (the whole path's probability), or by confidence
    (the node's own)."""
    rerank: bool = True
    """Verify the best of everything drafted; false: of what was expanded, level by level."""
    stop: float = 0.0
    """No children for nodes whose path is not more probable than this."""
    sharpness: float = 2.0
    """A child's chance is held to be softmax(sharpness x log q), greedily or with known noise; 1:
    the paper's."""

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "branch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"tree.{name} must be a whole number, 1 or more, got {value!r}")
        for name, known in (("noise", NOISES), ("expand", EXPANSIONS)):
            if getattr(self, name) not in known:
                raise OptionError(f"unknown tree.{name} {getattr(self, name)!r}; {near(str(getattr(self, name)), known)}")
        if not isinstance(self.rerank, bool):
            raise OptionError(f"tree.rerank must be true or false, got {self.rerank!r}")
        if not isinstance(self.stop, int | float) or isinstance(self.stop, bool) or not 0 <= self.stop < 1:
            raise OptionError(f"tree.stop must be a probability, 0 or more and below 1, got {self.stop!r}")
        if not isinstance(self.sharpness, int | float) or isinstance(self.sharpness, bool) or not 0 < self.sharpness <= 1000:
            raise OptionError(f"tree.sharpness must be a number above 0 and at most 1000, got {self.sharpness!r}")

    @property
    def shape(self) -> Shape:
        return Shape(self.nodes, self.depth, self.branch)

    @property
    def log_stop(self) -> float:
        return math.log(self.stop) if self.stop else -math.inf

    def describe(self) -> dict[str, Any]:
        """Shape and noise, and what differs from the paper's method."""
        unusual = {f.name: getattr(self, f.name) for f in fields(self)[4:] if getattr(self, f.name) != f.default}
        return {"kind": "dynamic", "nodes": self.nodes, "depth": self.depth, "branch": self.branch, "noise": self.noise, **unusual}


@dataclass(frozen=True)
class Growth:
    """What growing starts from."""

    read: Callable[[], Tensor]  # the net reads what was committed; its output [B, D] at the newest slot: predicted feature of the root
    head: Callable[[Tensor], Tensor]  # [..., D] -> logits [..., V]
    expand: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (tokens_BQ, features_BQD, visible_BQT, level) -> hidden_BQD
    draft_ids_v: Tensor | None = None  # the target's ids of the draft vocabulary, where the head speaks a smaller one
    at_once: Callable[[DynamicTree], Draft | None] | None = None  # all levels of a dynamic tree in one call, where there is a way

    @cached_property
    def hidden_BD(self) -> Tensor:
        return self.read()

    def ids(self, draft: Tensor) -> Tensor:
        """The head's token ids -> the target's."""
        return draft if self.draft_ids_v is None else self.draft_ids_v[draft]

    def noise(self, roots: CycleInput, level: int, vocab: int) -> Tensor:
        """[B, 1, v]: what the target will add to log p where a level's children stand; zero in greedy rows."""
        which = vocab if self.draft_ids_v is None else self.draft_ids_v
        return roots.noise.gumbel(roots.position_B[:, None] + level + 1, which)

    def seen(self, roots: CycleInput) -> Tensor | None:
        """bool [B, 1, v]: tokens that stand in the rows; None where no row asks."""
        if roots.history_BV is None:
            return None
        return (roots.history_BV if self.draft_ids_v is None else roots.history_BV[:, self.draft_ids_v])[:, None]


def _log_q(logits: Tensor) -> Tensor:
    """log softmax in float32; at most 0, so that no child scores above its parent; NaN counts as impossible."""
    return logits.float().log_softmax(-1).nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0.0)


def _best(score_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest with their indices; ties go to the smaller index."""
    values_BX, index_BX = score_BX.sort(dim=-1, descending=True, stable=True)
    return values_BX[:, :count], index_BX[:, :count]


def grow_dynamic(growth: Growth, roots: CycleInput, shape: DynamicTree) -> Draft:
    """EAGLE-2 (seed paper, section 4): expansion by joint confidence, then reranking of everything that was drafted.

    A node's value is the product of the chances along its path. At every level the `branch` best new nodes are expanded into `branch`
    children each; at the end the `nodes - 1` best of all are kept. Ties: by value, then shallower, then in order of drafting.
    A policy's decision may make the tree smaller.
    """
    if roots.tree_shape is not None:
        shape = replace(shape, **roots.tree_shape.within(shape.shape)._asdict())
    if growth.at_once is not None and (draft := growth.at_once(shape)) is not None:
        return draft
    B, device = roots.tokens_B.shape[0], roots.tokens_B.device
    hidden_BQD, seen_BQv = growth.hidden_BD[:, None], growth.seen(roots)
    children = _guess(growth, roots, shape, hidden_BQD, seen_BQv, 0)
    K = children.index.shape[-1]
    eye_BKK = torch.eye(K, dtype=torch.bool, device=device).expand(B, K, K)
    value_BX, pick_BK, visible_BKT = children.chance[:, 0], torch.arange(K, device=device).expand(B, K), eye_BKK
    # everything drafted, in order of drafting: token, log q, value, and the parent's place in these lists (-1 = the root)
    drafted = [(growth.ids(children.index[:, 0]), children.own[:, 0], value_BX, torch.full_like(pick_BK, -1))]
    beams, begin = [pick_BK], 0  # the places of the nodes that are expanded, level by level; where the last level begins
    for level in range(1, shape.depth):
        row_BK, index_BK = pick_BK // K, children.index.flatten(1).gather(1, pick_BK)
        if seen_BQv is not None:
            seen_BQv = _rows(seen_BQv, row_BK).scatter(2, index_BK[..., None], True)
        hidden_BQD = growth.expand(growth.ids(index_BK), _rows(hidden_BQD, row_BK), visible_BKT, level - 1)
        children = _guess(growth, roots, shape, hidden_BQD, seen_BQv, level)
        parent_BK1 = value_BX.gather(1, pick_BK)[..., None]
        chance_BKK = children.chance.masked_fill(parent_BK1 <= shape.log_stop, -math.inf)
        value_BX = (parent_BK1 + chance_BKK).flatten(1)
        begin += drafted[-1][0].shape[1]
        drafted.append((growth.ids(children.index).flatten(1), children.own.flatten(1), value_BX, beams[-1].repeat_interleave(K, dim=1)))
        pick_BK = _best(value_BX if shape.expand == "value" else chance_BKK.flatten(1), K)[1]
        beams.append(begin + pick_BK)
        visible_BKT = torch.cat([_rows(visible_BKT, pick_BK // K), eye_BKK], dim=-1)
    tokens_BX, own_BX, value_BX, parent_BX = (torch.cat(x, dim=1) for x in zip(*drafted, strict=True))
    keep_BX = _best(value_BX, shape.nodes - 1)[1] if shape.rerank else torch.cat(beams, dim=1)
    draft = _kept(roots, shape.depth, keep_BX[:, : shape.nodes - 1].sort(dim=-1).values, tokens_BX, own_BX, value_BX, parent_BX)
    zero_B1 = torch.zeros_like(parent_BX[:, :1])
    everything = FullDraft(torch.cat([zero_B1 - 1, parent_BX + 1], dim=1), torch.cat([zero_B1.to(value_BX.dtype), value_BX], dim=1))
    return replace(draft, drafted=everything) if shape.rerank else draft  # else what is kept is not the best of it


def _rows(x_BQZ: Tensor, row_BK: Tensor) -> Tensor:
    """[B, K, Z]: of each row these nodes' values."""
    return x_BQZ.gather(1, row_BK[..., None].expand(-1, -1, x_BQZ.shape[-1]))


@dataclass(frozen=True)
class _Children:
    """The best children of Q nodes; siblings have distinct tokens."""

    index: Tensor  # int64 [B, Q, K]; in the draft's vocabulary
    own: Tensor  # float32 [B, Q, K]; log q
    chance: Tensor  # float32 [B, Q, K]; log of how likely the target draws it, at most 0


def _guess(growth: Growth, roots: CycleInput, shape: DynamicTree, hidden_BQD: Tensor, seen_BQv: Tensor | None, level: int) -> _Children:
    """What the draft takes for the best children of a level's nodes."""
    logits_BQv = growth.head(hidden_BQD)
    count = min(shape.branch, logits_BQv.shape[-1])
    shared = shape.noise == "shared"
    log_q_BQv = _log_q(apply_sampling_rows(logits_BQv, roots.sampling, seen_BQv) if shared else logits_BQv)
    drawn = shared and not roots.noise.all_greedy
    key_BQv = log_q_BQv + growth.noise(roots, level, logits_BQv.shape[-1]) if drawn else log_q_BQv  # noise is zero in greedy rows
    index_BQK = key_BQv.topk(count).indices
    own_BQK = log_q_BQv.gather(-1, index_BQK)
    if not drawn and shape.sharpness == 1:
        return _Children(index_BQK, own_BQK, own_BQK)
    chance_BQK = _log_q(shape.sharpness * key_BQv).gather(-1, index_BQK)
    certain_B11 = roots.noise.greedy_B[:, None, None] | shared
    return _Children(index_BQK, own_BQK, torch.where(certain_B11, chance_BQK, own_BQK))


def _kept(roots: CycleInput, depth: int, keep_BM: Tensor, tokens_BX: Tensor, own_BX: Tensor, value_BX: Tensor, parent_BX: Tensor) -> Draft:
    """The tree of these nodes. A parent's value is no less than its child's and it was drafted earlier, so it is kept when its child is."""
    number_M = torch.arange(1, keep_BM.shape[1] + 1, device=keep_BM.device)
    place_BX = torch.zeros_like(parent_BX).scatter(1, keep_BM, number_M.expand_as(keep_BM))
    parent_BM = parent_BX.gather(1, keep_BM)
    parent_BM = torch.where(parent_BM < 0, 0, place_BX.gather(1, parent_BM.clamp(min=0)))

    def with_root(root_B: Tensor, rest_BM: Tensor) -> Tensor:
        return torch.cat([root_B[:, None], rest_BM], dim=1)

    candidate_BM = value_BX.gather(1, keep_BM) > -math.inf
    tree = Tree.build(
        with_root(torch.full_like(roots.tokens_B, -1), parent_BM), depth, with_root(torch.ones_like(roots.active_B), candidate_BM)
    )
    zero_B = torch.zeros_like(own_BX[:, 0])
    score_BN, value_BN = (with_root(zero_B, x_BX.gather(1, keep_BM)) for x_BX in (own_BX, value_BX))
    return Draft(tree, with_root(roots.tokens_B, tokens_BX.gather(1, keep_BM)), score_BN, value_BN=value_BN)


@dataclass(frozen=True)
class _Level:
    """One level of a static tree: its inner nodes, in node order, and the level's nodes, which are their children."""

    inner_Q: Tensor  # node numbers
    parent_Q: Tensor  # of those
    visible_1QT: Tensor  # which of the inner nodes so far, this level's last, each of them sees
    width: int  # most children of any of them
    child_M: Tensor  # node numbers
    flat_M: Tensor  # place of the child's parent among the inner nodes * width + rank


@dataclass(frozen=True)
class _Static:
    """A static tree in tensors."""

    tree: Tree  # one row
    levels: list[_Level]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, choices: Choices, device: torch.device) -> _Static:
        number = {path: n for n, path in enumerate(choices, start=1)} | {(): 0}
        parents = [-1, *(number[path[:-1]] for path in choices)]
        by_depth: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for path in choices:
            by_depth[len(path)].append(path)

        def tensor(numbers: Iterable[int]) -> Tensor:
            return torch.tensor(list(numbers), device=device)

        tree, levels, known = Tree.build(tensor(parents)[None], max(by_depth)), [], list[int]()
        for _, paths in sorted(by_depth.items()):
            inner = sorted({number[path[:-1]] for path in paths})
            known += inner
            width = 1 + max(path[-1] for path in paths)
            visible_1QT = tree.mask_BNN[:, tensor(inner)][:, :, tensor(known)]
            if inner == [0]:
                known = []  # the root has no slot of its own
            levels.append(_Level(
                tensor(inner), tensor(max(0, parents[n]) for n in inner), visible_1QT, width, tensor(number[path] for path in paths),
                tensor(inner.index(number[path[:-1]]) * width + path[-1] for path in paths),
            ))  # fmt: skip
        return cls(tree, levels)


def grow_static(growth: Growth, roots: CycleInput, choices: Choices, noise: str = "drawn", block: bool = False) -> Draft:
    """EAGLE-1's tree of fixed shape: a node's children are the draft's best tokens (greedy rows); in sampling rows, by `noise`,

    drawn: drawn from q without replacement, in the largest order of log q + Gumbel noise of the draft's own (Kool, van Hoof, Welling 2019);
        siblings stay in draw order;
    shared: chosen, as the largest of log q + the noise that the target will draw with.

    block: the tree is a chain, and what is drawn is to be verified as a whole (verify.py).
    q is processed by the row's own Sampling like p. A node that q gives no mass is no candidate.
    """
    B, device = roots.tokens_B.shape[0], roots.tokens_B.device
    plan = _Static.of(choices, device)
    shape, N = plan.tree.for_rows(B), plan.tree.nodes
    tokens_BN = torch.zeros(B, N, dtype=torch.long, device=device)
    tokens_BN[:, 0] = roots.tokens_B
    score_BN = torch.zeros(B, N, device=device)
    candidate_BN = torch.ones(B, N, dtype=torch.bool, device=device)
    q_BNV: Tensor | None = None
    hidden_BND = growth.hidden_BD[:, None].repeat(1, N, 1)  # at each node: the net's output there, i.e. the predicted feature
    for number, level in enumerate(plan.levels):
        inner_Q = level.inner_Q
        if number:
            visible_BQT = level.visible_1QT.expand(B, -1, -1)
            hidden_BND[:, inner_Q] = growth.expand(tokens_BN[:, inner_Q], hidden_BND[:, level.parent_Q], visible_BQT, number - 1)
        seen_BQV = None if roots.history_BV is None else shape.seen(tokens_BN, roots.history_BV)[:, inner_Q]
        scores_BQV = apply_sampling_rows(growth.head(hidden_BND[:, inner_Q]), roots.sampling, seen_BQV)
        key_BQV = scores_BQV
        if noise == "shared" and not roots.noise.all_greedy:
            key_BQV = scores_BQV + growth.noise(roots, number, scores_BQV.shape[-1])
        elif not roots.noise.all_greedy:
            place_BQ = roots.position_B[:, None] * N + inner_Q  # every node draws with noise of its own
            q_BQV = probs(scores_BQV, greedy=False)  # drawn from this very law, as rounded, so that verification knows what was done
            key_BQV = torch.where(roots.noise.greedy_B[:, None, None], scores_BQV, q_BQV.log())
            key_BQV = key_BQV + roots.noise.gumbel(place_BQ, scores_BQV.shape[-1], GumbelNoise.DRAFT)
            q_BNV = torch.zeros(B, N, scores_BQV.shape[-1], device=device) if q_BNV is None else q_BNV
            q_BNV[:, inner_Q] = q_BQV
        key_BQK, token_BQK = key_BQV.topk(level.width)
        own_BQK = _log_q(scores_BQV).gather(-1, token_BQK)
        key_BM, token_BM, own_BM = (x.flatten(1)[:, level.flat_M] for x in (key_BQK, token_BQK, own_BQK))
        tokens_BN[:, level.child_M], score_BN[:, level.child_M], candidate_BN[:, level.child_M] = token_BM, own_BM, key_BM > -math.inf
    tree = Tree(shape.parents_BN, candidate_BN, shape.depth_BN, shape.mask_BNN, shape.max_depth)
    return Draft(tree, tokens_BN, score_BN, q_BNV, block and q_BNV is not None)
