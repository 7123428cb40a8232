"""Two methods in one cycle: both draft, their trees are merged and verified once, and both learn the accepted tokens.

    eagle2   0 --- 1:a --- 2:b             verified   0 --- 1:a --- 2:b --- 6:d      as suffix   0 --- 1:a --- 2:b --- 3:d
             |---- 3:c                                |---- 3:c                      sees it     |---- 6:c
    suffix   0 --- 1:a --- 2:b --- 3:d                (4, 5: padding)                            (4, 5: padding)

Each session sees the cycle with its own nodes first, numbered as it numbered them. The other's
nodes come next, then those that neither has drafted (`core/row_drafts.py`), and the accepted path
may end on any of them.

This module knows no method. Letters: B rows, N nodes of the first tree, M of the second, F feature width,
P path, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, Drafter, DraftSession, method_name
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict, matching_nodes, merge

if TYPE_CHECKING:
    from eyas.core.target import Target

__all__ = ["Merged"]


class Merged(Drafter):
    """Drafts with `first` and `second`. Children that either method samples are verified as a
    deterministic tree, so ids are plain decoding's."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__(first.target)
        self.parts = (first, second)
        self.feature_layers = tuple(sorted({*first.feature_layers, *second.feature_layers}))
        self.net = first.net
        self.model_free = first.model_free and second.model_free

    def for_target(self, target: Target) -> Drafter:
        return Merged(*(part.for_target(target) for part in self.parts))

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)

    def describe(self) -> dict[str, Any]:
        first, second = self.parts
        return {**first.describe(), "with": {"method": method_name(second), **second.describe()}}


class Session(DraftSession):
    """A session of each method."""

    def __init__(self, drafter: Merged, rows: int) -> None:
        self.first, self.second = (part.open(rows) for part in drafter.parts)
        self.columns = [_columns(part.feature_layers, drafter.feature_layers) for part in drafter.parts]
        self.width = drafter.target.hidden_size
        self.drafts: tuple[Draft, Draft] | None = None
        # the node of the first tree with the same path of tokens as each of the second, or -1
        self.match_BM = torch.empty(0, dtype=torch.long)

    def truncate(self, row: int, length: int) -> int:
        """Return the number of tokens that both sessions still know; each may know less than it is asked to keep."""
        first = self.first.truncate(row, length)
        kept = self.second.truncate(row, first)
        if kept < first and self.first.truncate(row, kept) < kept:
            return 0
        return kept

    def copy(self, source: int, row: int, length: int) -> int:
        first = self.first.copy(source, row, length)
        kept = self.second.copy(source, row, first) if first else 0
        if kept < first and self.first.truncate(row, kept) < kept:
            return 0
        return kept

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        for session in (self.first, self.second):
            session.begin(row, cached_tokens, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        for session, columns in zip((self.first, self.second), self.columns, strict=True):
            session.prefill(row, tokens_T, _take(features_TF, columns, self.width), position)

    def draft(self, cycle_input: CycleInput) -> Draft:
        first, second = self.first.draft(cycle_input), self.second.draft(cycle_input)
        self.drafts = first, second
        self.match_BM = matching_nodes(first, second)
        return merge(first, second, self.match_BM)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        assert self.drafts is not None
        first, second = self.drafts
        first_features, second_features = (_take(output.features_BNF, columns, self.width) for columns in self.columns)
        self.first.commit(draft, verdict, replace(output, features_BNF=first_features))
        # `draft` may end with nodes that neither drafted
        N, both = first.tree.nodes, first.tree.nodes + second.tree.nodes - 1
        match_BN = _inverse(self.match_BM, N)
        number_BX = _renumber(match_BN, second.tree.nodes, draft.tree.nodes - both)
        path_BP = torch.where(verdict.path_BP < 0, -1, number_BX.gather(1, verdict.path_BP.clamp(min=0)))
        reordered = (
            torch.cat([x[:, :1], x[:, N:both], x[:, 1:N], x[:, both:]], 1) for x in (output.logits_BNV, second_features)
        )
        seen = _with_others(merge(second, first, match_BN), draft, number_BX)
        self.second.commit(seen, replace(verdict, path_BP=path_BP), TargetOutput(*reordered))

    def end(self, row: int) -> None:
        for session in (self.first, self.second):
            session.end(row)

    def clear(self, row: int) -> None:
        for session in (self.first, self.second):
            session.clear(row)


def _inverse(match_BM: Tensor, nodes: int) -> Tensor:
    """Return the node of the second tree that matches each of the first, or -1, int64 [B, nodes]."""
    number_BM = torch.arange(match_BM.shape[1], device=match_BM.device).expand_as(match_BM)
    # one more column, for nodes without a match
    inverse_BN = torch.full((len(match_BM), nodes + 1), -1, device=match_BM.device)
    return inverse_BN.scatter(1, torch.where(match_BM < 0, nodes, match_BM), number_BM)[:, :nodes]


def _renumber(match_BN: Tensor, nodes: int, others: int) -> Tensor:
    """Return the nodes of both trees, int64, and `others` after them, as numbered by the second session, whose tree
    has `nodes` nodes."""
    B, N = match_BN.shape
    order_N = torch.arange(N, device=match_BN.device)
    first_BN = torch.where(match_BN >= 0, match_BN, nodes - 1 + order_N)  # the root matches the root
    second_BM = torch.arange(1, nodes, device=match_BN.device).expand(B, -1)
    last_BX = torch.arange(N + nodes - 1, N + nodes - 1 + others, device=match_BN.device).expand(B, -1)
    return torch.cat([first_BN, second_BM, last_BX], dim=1)


def _with_others(seen: Draft, draft: Draft, number_BX: Tensor) -> Draft:
    """Return the two merged trees as the second session sees them, and the nodes of `draft` that neither
    session has drafted."""
    both = seen.tree.nodes
    if draft.tree.nodes == both:
        return seen
    parents_BX = torch.cat([seen.tree.parents_BN, number_BX.gather(1, draft.tree.parents_BN[:, both:])], dim=1)
    candidate_BX = torch.cat([seen.tree.acceptable_BN, draft.tree.acceptable_BN[:, both:]], dim=1)
    tokens_BX = torch.cat([seen.tokens_BN, draft.tokens_BN[:, both:]], dim=1)
    return Draft(Tree.build(parents_BX, draft.tree.max_depth, candidate_BX), tokens_BX)


def _columns(layers: Sequence[int], union: Sequence[int]) -> list[int] | None:
    """Return the indices of a method's feature layers among the union's; None when it reads all of them."""
    return None if tuple(layers) == tuple(union) else [union.index(layer) for layer in layers]


def _take(features: Tensor, columns: Sequence[int] | None, width: int) -> Tensor:
    """Return the features of some of the concatenated layers, each `width` wide; None for all of them."""
    if columns is None:
        return features
    return torch.cat([features[..., :0], *(features[..., i * width : (i + 1) * width] for i in columns)], dim=-1)
