"""Everything drafted is a tree: its shape, and the records that travel around the loop.

    prompt -> prefill -> [draft -> verify -> commit]* -> tokens
                          Draft    Verdict
                               Seen

A tree is its `parents`; depth, ancestor mask and paths derive from it. Node 0 is the root: the newest token, already emitted and not yet
in the target's cache. This example holds two candidates for the next token and three for the one after:

    node      0   1  2  3  4  5            mask (row attends to column)
    parent   -1   0  0  1  1  2                0 1 2 3 4 5
    depth     0   1  1  2  2  2             0  x
                                            1  x x
        0 --- 1 --- 3                       2  x   x
          |     |-- 4                       3  x x   x
          |---- 2 --- 5                     4  x x     x
                                            5  x   x     x

Letters: B rows, N nodes (M those of a second tree), P nodes on the longest path (max depth + 1), V vocabulary, F feature width.
This module knows no model, no method and no sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.errors import OptionError

__all__ = ["Choices", "Draft", "FullDraft", "TargetOutput", "Tree", "Verdict", "chain_choices", "check_choices", "matching_nodes", "merge"]


@dataclass(frozen=True)
class Tree:
    """`B` trees of `N` nodes each, with fixed shapes.

    Built with `Tree.build`; a parent comes before its children.
    """

    parents_BN: Tensor  # int64; -1 for the root, node 0
    candidate_BN: Tensor  # bool; False = forwarded but never accepted (scout, padding); the root is True
    depth_BN: Tensor  # int64; 0 for the root
    mask_BNN: Tensor  # bool; [b, n, m] = m is n or an ancestor of n
    max_depth: int  # no node lies deeper

    @classmethod
    def build(cls, parents_BN: Tensor, max_depth: int, candidate_BN: Tensor | None = None) -> Tree:
        """Derive depth and mask from parents.

        Args:
            parents_BN: int64, -1 in column 0 and nowhere else, each parent before its children.
            max_depth: an upper bound of the depth of the nodes; fixes the shapes without looking at the values.
            candidate_BN: which nodes may be accepted; all by default. A child of a node that is no candidate is none either.
        """
        B, N = parents_BN.shape
        mask_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
        ancestor_BN = parents_BN
        for _ in range(max_depth):
            reached_BNN = torch.arange(N, device=parents_BN.device) == ancestor_BN[..., None]
            mask_BNN = mask_BNN | reached_BNN
            ancestor_BN = torch.where(ancestor_BN < 0, -1, parents_BN.gather(1, ancestor_BN.clamp(min=0)))
        if candidate_BN is None:
            candidate_BN = torch.ones_like(parents_BN, dtype=torch.bool)
        return cls(parents_BN, candidate_BN, mask_BNN.sum(-1) - 1, mask_BNN, max_depth)

    @classmethod
    def chain(cls, rows: int, nodes: int, device: torch.device | str = "cpu") -> Tree:
        """0 - 1 - 2 - ... : the tree of a drafter that proposes one continuation; one node is vanilla decoding."""
        parents_BN = torch.arange(-1, nodes - 1, device=device).expand(rows, nodes)
        return cls.build(parents_BN, nodes - 1)

    def for_rows(self, rows: int) -> Tree:
        """A tree of one row, for each of many."""
        parents_BN, candidate_BN, depth_BN = (x.expand(rows, -1) for x in (self.parents_BN, self.candidate_BN, self.depth_BN))
        return Tree(parents_BN, candidate_BN, depth_BN, self.mask_BNN.expand(rows, -1, -1), self.max_depth)

    def seen(self, tokens_BN: Tensor, history_BV: Tensor) -> Tensor:
        """bool [B, N, V]: which tokens stand in each node's own prefix: the row's history, its ancestors and itself."""
        seen_BNV = history_BV[:, None].repeat(1, self.nodes, 1)
        b, n, ancestor = self.mask_BNN.nonzero(as_tuple=True)
        seen_BNV[b, n, tokens_BN[b, ancestor]] = True
        return seen_BNV

    @property
    def rows(self) -> int:
        return self.parents_BN.shape[0]

    @property
    def nodes(self) -> int:
        return self.parents_BN.shape[1]


@dataclass(frozen=True)
class FullDraft:
    """Everything that was drafted, X nodes, the root first, a parent before its children, siblings best first."""

    parents_BX: Tensor  # int64; -1 for the root
    value_BX: Tensor  # float32; as `Draft.value_BN`


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes."""

    tree: Tree
    tokens_BN: Tensor  # int64; column 0 = the root
    score_BN: Tensor | None = None  # float32; log q of the node given its parent (0 at the root); None: the drafter has no q
    q_BNV: Tensor | None = None  # float32; the processed law AT node n from which its candidate children were drawn without
    # replacement, in node order; None: children were chosen, not drawn
    block: bool = False  # with q: the tree is one chain, to be verified as a whole
    value_BN: Tensor | None = None  # float32; log of how probable the whole path to the node is held to be; only of grown trees
    drafted: FullDraft | None = None  # of which a grown tree is the best


@dataclass(frozen=True)
class TargetOutput:
    """What the target saw at every node."""

    logits_BNV: Tensor
    features_BNF: Tensor  # the layers that the drafter wants, side by side


@dataclass(frozen=True)
class Verdict:
    """The accepted path and the token after it."""

    path_BP: Tensor  # int64; node numbers, starts with node 0; -1 past the end
    tokens_BP: Tensor  # int64; the tokens of those nodes; past the end: 0
    length_B: Tensor  # int64; nodes on the path, the root counted: >= 1
    bonus_B: Tensor  # int64; the token after the path: the next root
    broken_B: Tensor | None = None  # bool; rows with a score that is not a number, where that was seen on the way


def matching_nodes(draft: Draft, other: Draft) -> Tensor:
    """int64 [B, M]: the candidate of `draft` that stands for the same tokens as each candidate of `other`; 0 for the root, -1 for none."""
    tree, beside = draft.tree, other.tree
    offered_BM = beside.candidate_BN & (beside.parents_BN >= 0)
    alike_BMN = (other.tokens_BN[:, :, None] == draft.tokens_BN[:, None]) & offered_BM[..., None] & tree.candidate_BN[:, None]
    twin_BM = torch.where(beside.parents_BN < 0, 0, -1)
    for _ in range(min(tree.max_depth, beside.max_depth)):  # nodes find theirs once their parents have: one level a round
        parent_BM = twin_BM.gather(1, beside.parents_BN.clamp(min=0))
        found_BMN = alike_BMN & (parent_BM >= 0)[..., None] & (tree.parents_BN[:, None] == parent_BM[..., None])
        twin_BM = torch.where(found_BMN.any(-1), found_BMN.int().argmax(-1), twin_BM)
    return twin_BM


def merge(draft: Draft, other: Draft, twin_BM: Tensor | None = None) -> Draft:
    """Two trees below one root, as one of N + M - 1 nodes: those of `draft`, then those of `other` without its root.

        0 --- 1:a --- 2:b     and     0 --- 1:a --- 2:c     are     0 --- 1:a --- 2:b         3 was the other's a: padding
                                                                         |---- 4:c

    Candidates that stand for the same tokens are united: the second becomes padding, its children hang below the first. What was drawn
    is from here on chosen: there is no q of a merged tree. Scores need both to have them.

    Args:
        twin_BM: `matching_nodes(draft, other)`, where it is known already.
    """
    twin_BM = matching_nodes(draft, other) if twin_BM is None else twin_BM
    N, M = draft.tree.nodes, other.tree.nodes
    place_BM = torch.where(twin_BM >= 0, twin_BM, torch.arange(N - 1, N + M - 1, device=twin_BM.device))
    parents_BM = place_BM.gather(1, other.tree.parents_BN.clamp(min=0))

    def join(mine_BN: Tensor, theirs_BM: Tensor) -> Tensor:
        return torch.cat([mine_BN, theirs_BM[:, 1:]], dim=1)

    scores = None
    if draft.score_BN is not None and other.score_BN is not None:
        scores = join(draft.score_BN, other.score_BN)
    tree = Tree.build(
        join(draft.tree.parents_BN, parents_BM),
        max(draft.tree.max_depth, other.tree.max_depth),
        join(draft.tree.candidate_BN, other.tree.candidate_BN & (twin_BM < 0)),
    )
    return Draft(tree, join(draft.tokens_BN, other.tokens_BN), scores)


Choices = tuple[tuple[int, ...], ...]  # a static tree: each node's path, as ranks among its parent's children


def chain_choices(depth: int) -> Choices:
    """The static tree that is a chain of `depth` draft tokens."""
    return tuple((0,) * d for d in range(1, depth + 1))


def check_choices(choices: Iterable[Sequence[int]]) -> Choices:
    """Sort the paths of a static tree by depth, then rank; OptionError when they are no tree.

    A path lists, from the root down, the rank of each node among its parent's children: (0,), (1,), (0, 0), ...
    """
    paths = sorted({tuple(c) for c in choices}, key=lambda c: (len(c), c))
    known = set(paths)
    for path in paths:
        if not path or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
            raise OptionError(f"tree choices: {list(path)} is not a list of ranks (whole numbers from 0)")
        if len(path) > 1 and path[:-1] not in known:
            raise OptionError(f"tree choices: {list(path)} has no parent; add {list(path[:-1])}")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in known:
            raise OptionError(f"tree choices: {list(path)} has no elder sibling; add {[*path[:-1], path[-1] - 1]}")
    if not paths:
        raise OptionError("tree choices: the tree is empty; give at least [0]")
    return tuple(paths)
