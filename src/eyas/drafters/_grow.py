"""Draft trees grown level by level: EAGLE-2's dynamic tree (`grow_dynamic`) and static trees (`grow_static`).

Both work on a `DraftNetSteps`: functions of the draft net for one cycle. `forward_pending` lets the net read
the newly committed tokens, `expand` is one forward of the net over the nodes of a level. The nodes
of a level attend to the committed slots, and among the slots of the tree to their ancestors and
themselves (`visible_BQT`).

**Coupled noise.** The target draws argmax(log p + g). The Gumbel noise g is a function of seed,
position and token, so it is known before the target runs (`core.sampling`). The draft therefore ranks children
by log q + g, with q processed by the row's own Sampling like p. So it guesses the token that the target will
draw with this seed. (Drafter-invariant coupling: Daliri, Musco, Suresh 2024; here with K children.) Greedy rows
are the case g = 0.

**Confidence temperature.** EAGLE-2 takes q itself as the confidence of a child. That is right when
the target samples with noise that the draft does not know. In greedy rows, or with coupled noise, the target's
next token is the argmax of log p + g and not random. Only the draft's error, log q - log p, is unknown. If
these errors are modelled as Gumbel variables of scale T, then the child x is the argmax with probability
softmax((log q + g) / T). T is `confidence_temperature`; T = 1 without noise is the paper's rule.

Letters: B rows, Q nodes of a level, T nodes of all levels so far, K children of a node, X all drafted nodes, N
nodes of the final tree, M those without the root, D hidden, V vocabulary of the target, v of the draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.drafter import CycleInput, TreeSize
from eyas.core.features import RowNodes
from eyas.core.params import is_number
from eyas.core.sampling import GumbelNoise, apply_sampling_rows, probs
from eyas.core.tree import Choices, Draft, FullDraft, Tree
from eyas.drafters._options import check_choice, check_whole
from eyas.errors import OptionError
from eyas.nn import DraftKVCache

__all__ = [
    "DraftNetSteps", "DynamicTree", "FusedTreeBuilder", "PartialTree", "grow_dynamic",
    "grow_static", "has_masks", "only_allowed",
]  # fmt: skip

NOISES = ("coupled", "none")


@dataclass(frozen=True)
class DynamicTree:
    """Options of EAGLE-2's tree: expand the nodes of the highest values, then keep the best of all
    drafted nodes (rerank)."""

    nodes: int = 60
    """Verified per cycle, the root included."""
    depth: int = 8
    """Most draft tokens on a path."""
    branch: int = 10
    """Nodes expanded per level, and children of each."""
    noise: str = "coupled"
    """Sampling: rank children with the target's own noise (coupled), or by q alone (none)."""
    expand: str = "value"
    """Expand the nodes of the best value (probability of the whole path) or confidence (of the node
    alone)."""
    rerank: bool = True
    """Verify the best nodes of everything drafted; false: the expanded nodes, level by level."""
    stop: float = 0.0
    """A node gets no children when its path is not more probable than this."""
    confidence_temperature: float = 0.5
    """A child's chance is softmax(log q / this), greedily or with coupled noise; 1: as in the paper."""

    def __post_init__(self) -> None:
        check_whole("tree", 1, nodes=self.nodes, depth=self.depth, branch=self.branch)
        check_choice("tree.noise", self.noise, NOISES)
        check_choice("tree.expand", self.expand, ("value", "confidence"))
        if not isinstance(self.rerank, bool):
            raise OptionError(f"tree.rerank must be true or false, got {self.rerank!r}")
        if not is_number(self.stop) or not 0 <= self.stop < 1:
            raise OptionError(f"tree.stop must be a probability, 0 or more and below 1, got {self.stop!r}")
        if not is_number(self.confidence_temperature) or self.confidence_temperature < 0.001:
            raise OptionError(
                f"tree.confidence_temperature must be a number, 0.001 or more, got {self.confidence_temperature!r}"
            )

    @property
    def size(self) -> TreeSize:
        return TreeSize(self.nodes, self.depth, self.branch)

    @property
    def log_stop(self) -> float:
        return math.log(self.stop) if self.stop else -math.inf

    def describe(self) -> dict[str, Any]:
        """Return size and noise, and all other options that differ from their defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self)[4:] if getattr(self, f.name) != f.default}
        return {"kind": "dynamic", **self.size._asdict(), "noise": self.noise, **changed}


class FusedTreeBuilder(Protocol):
    """Grows a whole dynamic tree of one EAGLE net at once, all its levels."""

    @property
    def fuses_features(self) -> bool:
        """Whether it reads the target's features; False: it reads the output of the net's `fuse`."""
        ...

    def suits(self, cycle_input: CycleInput) -> bool:
        """Return whether it supports the Sampling of all rows."""
        ...

    def __call__(
        self, features_BPF: Tensor, tokens_BP: Tensor, count_B: Tensor, cycle_input: CycleInput, tree: DynamicTree, cache: DraftKVCache,
        length_B: Tensor, width: int,
    ) -> Draft:  # fmt: skip
        """Let the net read the pending pairs (see drafters/_eagle.py), in the slots after
        `length_B`, then grow the tree below the roots.

        Args:
            features_BPF, tokens_BP, count_B: features and tokens that the net has not read yet, and
                their number in each row.
            width: at least as many slots of the cache as any row uses, the tree's included.
        """
        ...


@dataclass(frozen=True)
class DraftNetSteps:
    """A draft net in one cycle, as the functions that growing a tree needs."""

    # a forward of the net over the newly committed tokens; returns its output [B, D] at the newest
    # one, from which the children of the root are predicted
    forward_pending: Callable[[], Tensor]
    head: Callable[[Tensor], Tensor]  # hidden [..., D] -> logits [..., V or v]
    # (tokens_BQ, hidden_BQD of their parents, visible_BQT, level: depth of these nodes - 1) ->
    # hidden_BQD
    expand: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    draft_ids_v: Tensor | None = None  # the target's ids of a draft vocabulary that is smaller than the target's
    # grows a whole dynamic tree in one call; it returns None if it cannot
    build_fused: Callable[[DynamicTree], Draft | None] | None = None

    @classmethod
    def of_levels(cls, logits_BLV: Tensor, draft_ids_v: Tensor | None = None) -> DraftNetSteps:
        """Return the steps of a net that has computed L levels in one pass; all nodes of a level have the same logits."""

        def expand(tokens_BQ: Tensor, parents: Tensor, visible: Tensor, level: int) -> Tensor:
            return logits_BLV[:, level + 1 : level + 2].expand(-1, tokens_BQ.shape[1], -1)

        return cls(lambda: logits_BLV[:, 0], lambda logits: logits, expand, draft_ids_v)

    @cached_property
    def hidden_BD(self) -> Tensor:
        """The result of `forward_pending`, which is called once."""
        return self.forward_pending()

    def ids(self, tokens: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft vocabulary."""
        return tokens if self.draft_ids_v is None else self.draft_ids_v[tokens]

    def noise(self, cycle_input: CycleInput, level: int, vocab: int) -> Tensor:
        """Return the noise, float32 [B, 1, v], with which the target draws the tokens of the next level; zero in
        greedy rows."""
        tokens = vocab if self.draft_ids_v is None else self.draft_ids_v
        return cycle_input.noise.gumbel(cycle_input.position_B[:, None] + level + 1, tokens)

    def adjustments(self, cycle_input: CycleInput) -> Adjustments | None:
        """Return the adjustments [B, 1, ...] of the roots, for the draft's vocabulary; None if there are none."""
        if cycle_input.adjustments is None:
            return None
        roots = cycle_input.adjustments.for_depths(torch.zeros_like(cycle_input.position_B[:1]))
        return roots if self.draft_ids_v is None else roots.for_draft_vocab(self.draft_ids_v)


def _log_q(logits: Tensor) -> Tensor:
    """Log softmax in float32. At most 0, so that no child has a higher value than its parent; NaN becomes -inf."""
    return logits.float().log_softmax(-1).nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0.0)


def _best(score_BX: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest scores and their indices; ties go to the smaller index."""
    values_BX, index_BX = score_BX.sort(dim=-1, descending=True, stable=True)
    return values_BX[:, :count], index_BX[:, :count]


# --- dynamic trees


def grow_dynamic(net_steps: DraftNetSteps, cycle_input: CycleInput, tree: DynamicTree) -> Draft:
    """Grow EAGLE-2's dynamic tree (section 4): expand the nodes of the highest values, then rerank all drafted nodes.

    A node's value is the product of the confidences along its path. At every level the `branch` best new nodes
    get `branch` children each; at the end the `nodes - 1` best of all nodes are kept. Ties go to the shallower
    node, then to the one drafted earlier. `cycle_input.tree_size` may ask for a smaller tree than the options.
    """
    if cycle_input.tree_size is not None:
        tree = replace(tree, **cycle_input.tree_size.within(tree.size)._asdict())
    if net_steps.build_fused is not None and not has_masks(cycle_input):
        draft = net_steps.build_fused(tree)
        if draft is not None:
            return draft
    grower = _Grower.at_root(net_steps, cycle_input, tree)
    for _ in range(1, tree.depth):
        grower.grow_level()
    return grower.draft()


@dataclass
class _Grower:
    """A dynamic tree while it grows, level by level, with the state of the nodes whose children are drafted next."""

    net_steps: DraftNetSteps
    cycle_input: CycleInput
    tree: DynamicTree
    # the nodes whose children were drafted last
    hidden_BQD: Tensor  # the net's output at them
    adjustments: Adjustments | None  # penalties and biases after them
    partial_tree: PartialTree | None  # the tree down to them, where a constraint masks tokens
    # their children
    children: _Children
    value_BX: Tensor  # log value of each child, parent by parent
    pick_BK: Tensor  # the children that are expanded next, as indices into value_BX
    visible_BKT: Tensor  # which expanded nodes each of these attends to
    itself_BKK: Tensor  # each to itself
    # all levels so far
    drafted: list[_DraftedLevel]
    expanded: list[Tensor]  # [B, K] a level: indices of the expanded nodes among all drafted ones
    level: int = 0  # depth of the children, less one

    @classmethod
    def at_root(cls, net_steps: DraftNetSteps, cycle_input: CycleInput, tree: DynamicTree) -> _Grower:
        """Draft the children of the root."""
        hidden_BQD = net_steps.hidden_BD[:, None]
        adjustments = net_steps.adjustments(cycle_input)
        partial_tree = PartialTree.root(cycle_input) if has_masks(cycle_input) else None
        children = _best_children(net_steps, cycle_input, tree, hidden_BQD, adjustments, partial_tree, 0)
        value_BX = children.log_confidence[:, 0]
        B, K = value_BX.shape
        pick_BK = torch.arange(K, device=value_BX.device).expand(B, K)
        itself_BKK = torch.eye(K, dtype=torch.bool, device=value_BX.device).expand(B, K, K)
        tokens_BX = net_steps.ids(children.index[:, 0])
        drafted = _DraftedLevel(tokens_BX, children.log_q[:, 0], value_BX, torch.full_like(pick_BK, -1))
        return cls(
            net_steps, cycle_input, tree, hidden_BQD, adjustments, partial_tree,
            children, value_BX, pick_BK, itself_BKK, itself_BKK, [drafted], [pick_BK],
        )  # fmt: skip

    def grow_level(self) -> None:
        """Expand the picked nodes: draft their children, and pick among these."""
        K = self.pick_BK.shape[1]
        parent_BK = self.pick_BK // K
        parent_value_BK1 = self.value_BX.gather(1, self.pick_BK)[..., None]
        self._forward(parent_BK)
        log_confidence_BKK = self.children.log_confidence
        log_confidence_BKK = log_confidence_BKK.masked_fill(parent_value_BK1 <= self.tree.log_stop, -math.inf)
        self.value_BX = (parent_value_BK1 + log_confidence_BKK).flatten(1)
        first = sum(level.tokens_BX.shape[1] for level in self.drafted)  # index of the first new node
        tokens_BX = self.net_steps.ids(self.children.index).flatten(1)
        parent_BX = self.expanded[-1].repeat_interleave(K, dim=1)
        self.drafted.append(_DraftedLevel(tokens_BX, self.children.log_q.flatten(1), self.value_BX, parent_BX))
        rank_BX = self.value_BX if self.tree.expand == "value" else log_confidence_BKK.flatten(1)
        self.pick_BK = _best(rank_BX, K)[1]
        self.expanded.append(first + self.pick_BK)
        ancestors_BKT = _take_nodes(self.visible_BKT, self.pick_BK // K)
        self.visible_BKT = torch.cat([ancestors_BKT, self.itself_BKK], dim=-1)

    def _forward(self, parent_BK: Tensor) -> None:
        """Run the net over the picked nodes, whose parents are these of the last level, and draft their children."""
        index_BK = self.children.index.flatten(1).gather(1, self.pick_BK)
        tokens_BK = self.net_steps.ids(index_BK)
        if self.adjustments is not None:
            self.adjustments = self.adjustments.of_nodes(parent_BK).after_tokens(index_BK)
        if self.partial_tree is not None:
            self.partial_tree = self.partial_tree.with_level(parent_BK, tokens_BK)
        parent_hidden_BKD = _take_nodes(self.hidden_BQD, parent_BK)
        self.hidden_BQD = self.net_steps.expand(tokens_BK, parent_hidden_BKD, self.visible_BKT, self.level)
        self.level += 1
        self.children = _best_children(
            self.net_steps,
            self.cycle_input,
            self.tree,
            self.hidden_BQD,
            self.adjustments,
            self.partial_tree,
            self.level,
        )

    def draft(self) -> Draft:
        """Keep the best of all drafted nodes, or the expanded ones where the tree is not reranked."""
        drafted = _DraftedLevel(*(torch.cat(parts, dim=1) for parts in zip(*self.drafted, strict=True)))
        count = self.tree.nodes - 1
        selected_BX = _best(drafted.value_BX, count)[1] if self.tree.rerank else torch.cat(self.expanded, dim=1)
        selected_BM = selected_BX[:, :count].sort(dim=-1).values
        draft = _kept(self.cycle_input, self.tree.depth, selected_BM, *drafted)
        if not self.tree.rerank:  # the kept nodes are not those of the highest values, as `Draft.drafted` promises
            return draft
        zero_B1 = torch.zeros_like(drafted.parent_BX[:, :1])
        parents_BX = torch.cat([zero_B1 - 1, drafted.parent_BX + 1], dim=1)
        value_BX = torch.cat([zero_B1.to(drafted.value_BX.dtype), drafted.value_BX], dim=1)
        return replace(draft, drafted=FullDraft(parents_BX, value_BX))


class _DraftedLevel(NamedTuple):
    """The drafted nodes of a level, or of all levels one after another."""

    tokens_BX: Tensor
    log_q_BX: Tensor
    value_BX: Tensor  # log value
    parent_BX: Tensor  # index among the nodes of all levels; -1: the root


def _take_nodes(x_BQZ: Tensor, row_BK: Tensor) -> Tensor:
    """Return the entries of K of the Q nodes, [B, K, Z]."""
    return x_BQZ.gather(1, row_BK[..., None].expand(-1, -1, x_BQZ.shape[-1]))


@dataclass(frozen=True)
class _Children:
    """The best children of Q nodes; siblings have distinct tokens."""

    index: Tensor  # int64 [B, Q, K]; token ids of the draft vocabulary
    log_q: Tensor  # float32 [B, Q, K]
    log_confidence: Tensor
    """float32 [B, Q, K]; log of the child's confidence, the estimate that the target draws it; at most 0."""


def _best_children(
    net_steps: DraftNetSteps, cycle_input: CycleInput, tree: DynamicTree, hidden_BQD: Tensor, adjustments: Adjustments | None,
    partial_tree: PartialTree | None, level: int,
) -> _Children:  # fmt: skip
    """Return the `branch` most likely children of each node of a level."""
    logits_BQv = only_allowed(net_steps.head(hidden_BQD), cycle_input, partial_tree, net_steps.draft_ids_v)
    count = min(tree.branch, logits_BQv.shape[-1])
    coupled = tree.noise == "coupled"
    scores_BQv = apply_sampling_rows(logits_BQv, cycle_input.sampling, adjustments) if coupled else logits_BQv
    log_q_BQv = _log_q(scores_BQv)
    key_BQv = log_q_BQv  # the children are ranked by it
    noisy = coupled and not cycle_input.noise.all_greedy
    if noisy:
        key_BQv = log_q_BQv + net_steps.noise(cycle_input, level, logits_BQv.shape[-1])
    index_BQK = key_BQv.topk(count).indices
    log_q_BQK = log_q_BQv.gather(-1, index_BQK)
    if not noisy and tree.confidence_temperature == 1:
        return _Children(index_BQK, log_q_BQK, log_q_BQK)
    log_confidence_BQK = _log_q(key_BQv / tree.confidence_temperature).gather(-1, index_BQK)
    # rows whose next token is determined: greedy, or known noise
    determined_B11 = cycle_input.noise.greedy_B[:, None, None] | coupled
    log_confidence_BQK = torch.where(determined_B11, log_confidence_BQK, log_q_BQK)
    return _Children(index_BQK, log_q_BQK, log_confidence_BQK)


def _kept(
    cycle_input: CycleInput,
    depth: int,
    selected_BM: Tensor,
    tokens_BX: Tensor,
    log_q_BX: Tensor,
    value_BX: Tensor,
    parent_BX: Tensor,
) -> Draft:
    """Return the tree of the drafted nodes with indices `selected_BM`.

    With each node its parent is kept too: its value is at least the child's, and it was drafted earlier.
    """
    number_M = torch.arange(1, selected_BM.shape[1] + 1, device=selected_BM.device)
    node_BX = torch.zeros_like(parent_BX).scatter(1, selected_BM, number_M.expand_as(selected_BM))
    parent_BM = parent_BX.gather(1, selected_BM)
    parent_BM = torch.where(parent_BM < 0, 0, node_BX.gather(1, parent_BM.clamp(min=0)))

    def with_root(root_B: Tensor, rest_BM: Tensor) -> Tensor:
        return torch.cat([root_B[:, None], rest_BM], dim=1)

    parents_BN = with_root(torch.full_like(cycle_input.tokens_B, -1), parent_BM)
    possible_BM = value_BX.gather(1, selected_BM) > -math.inf
    tree = Tree.build(parents_BN, depth, with_root(torch.ones_like(cycle_input.active_B), possible_BM))
    zero_B = torch.zeros_like(log_q_BX[:, 0])
    tokens_BN = with_root(cycle_input.tokens_B, tokens_BX.gather(1, selected_BM))
    log_q_BN = with_root(zero_B, log_q_BX.gather(1, selected_BM))
    value_BN = with_root(zero_B, value_BX.gather(1, selected_BM))
    return Draft(tree, tokens_BN, log_q_BN, value_BN=value_BN)


# --- static trees


@dataclass(frozen=True)
class _StaticLevel:
    """One step of growing a static tree: the nodes of a level that have children (inner nodes), and these children."""

    inner_Q: Tensor  # node numbers of the inner nodes
    parent_Q: Tensor  # node numbers of their parents
    visible_1QT: Tensor  # bool; which inner nodes of this and earlier levels each inner node attends to
    width: int  # the largest number of children of an inner node
    child_M: Tensor  # node numbers of the children
    flat_M: Tensor  # index of each child in [Q, width] flattened: index of its parent in inner_Q * width + rank


@dataclass(frozen=True)
class _Static:
    """A static tree, and the steps in which it is grown."""

    tree: Tree  # the tree of one row
    levels: list[_StaticLevel]

    @classmethod
    @lru_cache(maxsize=64)
    def from_choices(cls, choices: Choices, device: torch.device) -> _Static:
        number = {path: n for n, path in enumerate(choices, start=1)} | {(): 0}
        parents = [-1, *(number[path[:-1]] for path in choices)]
        by_depth: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for path in choices:
            by_depth[len(path)].append(path)

        def tensor(numbers: Iterable[int]) -> Tensor:
            return torch.tensor(list(numbers), device=device)

        tree = Tree.build(tensor(parents)[None], max(by_depth))
        levels = []
        slots = list[int]()  # the inner nodes in the order of their slots in the draft's cache
        for _, paths in sorted(by_depth.items()):
            inner = sorted({number[path[:-1]] for path in paths})
            slots += inner
            width = 1 + max(path[-1] for path in paths)
            visible_1QT = tree.mask_BNN[:, tensor(inner)][:, :, tensor(slots)]
            if inner == [0]:
                slots = []  # the root has no slot of the tree: `DraftNetSteps.forward_pending` has committed it
            parent_Q = tensor(max(0, parents[n]) for n in inner)
            child_M = tensor(number[path] for path in paths)
            flat_M = tensor(inner.index(number[path[:-1]]) * width + path[-1] for path in paths)
            levels.append(_StaticLevel(tensor(inner), parent_Q, visible_1QT, width, child_M, flat_M))
        return cls(tree, levels)


def grow_static(
    net_steps: DraftNetSteps,
    cycle_input: CycleInput,
    choices: Choices,
    noise: str = "sampled",
    block_verification: bool = False,
) -> Draft:
    """Grow EAGLE-1's static tree. In greedy rows the children of a node are the tokens of the highest q.

    q is processed by the row's own Sampling like p. A node of probability 0 in q is not acceptable.

    Args:
        noise: for rows that sample. "sampled": the children are sampled from q without replacement,
            as the tokens with the largest log q + Gumbel noise of the draft's own stream (Kool, van Hoof,
            Welling 2019). Siblings stay in draw order, and the draft has q_BNV. "independent": each child is drawn
            by itself, so siblings may be equal; each node of a level has the same number of children. "coupled": the
            children are the tokens with the largest log q + the noise with which the target samples.
        block_verification: the tree is a chain; if its tokens are samples, block verification applies
            (`core.verify`).
    """
    B, device = cycle_input.tokens_B.shape[0], cycle_input.tokens_B.device
    static = _Static.from_choices(choices, device)
    shape, N = static.tree.for_rows(B), static.tree.nodes
    sampled = noise in ("sampled", "independent") and not cycle_input.noise.all_greedy
    coupled = noise == "coupled" and not cycle_input.noise.all_greedy
    tokens_BN = torch.zeros(B, N, dtype=torch.long, device=device)
    tokens_BN[:, 0] = cycle_input.tokens_B
    log_q_BN = torch.zeros(B, N, dtype=torch.float32, device=device)
    acceptable_BN = torch.ones(B, N, dtype=torch.bool, device=device)
    q_BNV: Tensor | None = None
    hidden_BND = net_steps.hidden_BD[:, None].repeat(1, N, 1)  # the net's output at each node
    for number, level in enumerate(static.levels):
        inner_Q = level.inner_Q
        if number:
            visible_BQT = level.visible_1QT.expand(B, -1, -1)
            parent_hidden_BQD = hidden_BND[:, level.parent_Q]
            hidden_BQD = net_steps.expand(tokens_BN[:, inner_Q], parent_hidden_BQD, visible_BQT, number - 1)
            hidden_BND[:, inner_Q] = hidden_BQD
        adjustments = None
        if cycle_input.adjustments is not None:
            adjustments = cycle_input.adjustments.for_tree(shape, tokens_BN)[:, inner_Q]
        partial_tree = PartialTree(shape.parents_BN, tokens_BN, inner_Q)
        logits_BQV = net_steps.head(hidden_BND[:, inner_Q])
        logits_BQV = only_allowed(logits_BQV, cycle_input, partial_tree, net_steps.draft_ids_v)
        scores_BQV = apply_sampling_rows(logits_BQV, cycle_input.sampling, adjustments)
        vocab = scores_BQV.shape[-1]
        key_BQV = scores_BQV
        if coupled:
            key_BQV = scores_BQV + net_steps.noise(cycle_input, number, vocab)
        elif sampled:
            # draws use log of this rounded q, because verification divides by it
            q_BQV = probs(scores_BQV, greedy=False)
            q_BNV = q_BQV.new_zeros(B, N, vocab) if q_BNV is None else q_BNV
            q_BNV[:, inner_Q] = q_BQV
            key_BQV = torch.where(cycle_input.noise.greedy_B[:, None, None], scores_BQV, q_BQV.log())
            place_BQ = cycle_input.position_B[:, None] * N + inner_Q  # one noise key for each node of each cycle
            key_BQV = key_BQV + cycle_input.noise.gumbel(place_BQ, vocab, GumbelNoise.DRAFT)
        key_BQK, token_BQK = key_BQV.topk(level.width)
        if sampled and noise == "independent":
            place_BM = cycle_input.position_B[:, None] * N + level.child_M  # one noise key for each child
            gumbel_BMV = cycle_input.noise.gumbel(place_BM, vocab, GumbelNoise.DRAFT)
            drawn_BQK = (q_BQV.log()[:, :, None] + gumbel_BMV.reshape(B, -1, level.width, vocab)).max(-1)
            greedy_B11 = cycle_input.noise.greedy_B[:, None, None]
            key_BQK, token_BQK = (
                torch.where(greedy_B11, *pair) for pair in zip((key_BQK, token_BQK), drawn_BQK, strict=True)
            )
        log_q_BQK = _log_q(scores_BQV).gather(-1, token_BQK)
        tokens_BN[:, level.child_M] = token_BQK.flatten(1)[:, level.flat_M]
        log_q_BN[:, level.child_M] = log_q_BQK.flatten(1)[:, level.flat_M]
        acceptable_BN[:, level.child_M] = key_BQK.flatten(1)[:, level.flat_M] > -math.inf
    tree = Tree(shape.parents_BN, acceptable_BN, shape.depth_BN, shape.mask_BNN, shape.max_depth)
    return Draft(tree, tokens_BN, log_q_BN, q_BNV, block_verification and q_BNV is not None)


class PartialTree(NamedTuple):
    """A tree that grows, and the nodes whose children are sought."""

    parents_BM: Tensor  # int64; a parent before its children, -1 for the root
    tokens_BM: Tensor  # int64
    nodes_Q: Tensor  # int64; node numbers

    @classmethod
    def root(cls, cycle_input: CycleInput) -> PartialTree:
        tokens_B1 = cycle_input.tokens_B[:, None]
        return cls(torch.full_like(tokens_B1, -1), tokens_B1, torch.zeros_like(tokens_B1[0]))

    def with_level(self, parent_BK: Tensor, tokens_BK: Tensor) -> PartialTree:
        """Return the tree with a level more, whose children are sought next."""
        M, K = self.parents_BM.shape[1], tokens_BK.shape[1]
        parents_BM = torch.cat([self.parents_BM, self.nodes_Q[parent_BK]], dim=1)
        return PartialTree(
            parents_BM, torch.cat([self.tokens_BM, tokens_BK], dim=1), torch.arange(M, M + K, device=tokens_BK.device)
        )


def has_masks(cycle_input: CycleInput) -> bool:
    """Return whether a constraint says which tokens may follow in any row."""
    return any(feature.masks for features in cycle_input.features for feature in features)


def only_allowed(
    logits_BQv: Tensor, cycle_input: CycleInput, partial_tree: PartialTree | None, draft_ids_v: Tensor | None
) -> Tensor:
    """Return the logits with -inf for the tokens that the constraint of their row forbids; the same tensor
    without constraints.

    Args:
        logits_BQv: of the nodes `partial_tree.nodes_Q`.
        partial_tree: None is enough without constraints.
        draft_ids_v: the target's ids of a draft vocabulary that is smaller than the target's.
    """
    if not has_masks(cycle_input):
        return logits_BQv
    assert partial_tree is not None
    masked_BQv, nodes = logits_BQv.clone(), partial_tree.nodes_Q.tolist()
    for b, feature in ((b, f) for b, features in enumerate(cycle_input.features) for f in features if f.masks):
        parents, tokens = partial_tree.parents_BM[b].tolist(), partial_tree.tokens_BM[b].tolist()
        open_nodes = cycle_input.ends[b].open_nodes(parents, tokens)
        # verification reports failures
        mask_NV, _ = feature.mask(RowNodes(parents, tokens, cycle_input.row_tokens[b], open_nodes))
        mask_QV = mask_NV[nodes].to(logits_BQv.device)
        mask_Qv = mask_QV if draft_ids_v is None else mask_QV[:, draft_ids_v]
        some_Q1 = mask_Qv.any(-1, keepdim=True)  # where nothing may follow, drafts may be anything
        masked_BQv[b].masked_fill_(~mask_Qv & some_Q1, -torch.inf)
    return masked_BQv
