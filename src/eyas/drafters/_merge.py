"""Two methods in one cycle: both draft, their trees are merged, verified once, and both learn what was accepted.

    eagle2   0 --- 1:a --- 2:b             verified   0 --- 1:a --- 2:b --- 6:d      what suffix   0 --- 1:a --- 2:b --- 3:d
             |---- 3:c                                |---- 3:c                      is handed     |---- 6:c
    suffix   0 --- 1:a --- 2:b --- 3:d                (4, 5: padding)                              (4, 5: padding)

A session is handed the cycle with its own nodes first, numbered as it numbered them; the other's come behind, on which the path may end.

This module knows no method. Letters: B rows, N nodes of the first tree, M of the second, F feature width, P path, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, Drafter, DraftSession, method_name
from eyas.core.tree import Draft, TargetOutput, Verdict, matching_nodes, merge

__all__ = ["Merged"]


class Merged(Drafter):
    """Drafts with `first` and with `second`. What either draws is chosen here: the same ids as plain decoding with the same seed."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        super().__init__(first.target)
        self.parts = (first, second)
        self.feature_layers = tuple(sorted({*first.feature_layers, *second.feature_layers}))
        self.net, self.trained_length, self.target_fingerprint = first.net, first.trained_length, first.target_fingerprint
        self.model_free = first.model_free and second.model_free

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)

    def describe(self) -> dict[str, Any]:
        first, second = self.parts
        return {**first.describe(), "with": {"method": method_name(second), **second.describe()}}


class Session(DraftSession):
    """A session of each."""

    def __init__(self, drafter: Merged, rows: int) -> None:
        self.first, self.second = (part.open(rows) for part in drafter.parts)
        self.places = [_places(part.feature_layers, drafter.feature_layers) for part in drafter.parts]
        self.width = drafter.target.hidden_size
        self.drafts: tuple[Draft, Draft] | None = None
        self.twin_BM = torch.empty(0)

    def keep(self, row: int, length: int) -> int:
        """What both still know; either may know less than it was asked to keep."""
        asked = self.first.keep(row, length)
        kept = self.second.keep(row, asked)
        if kept < asked and self.first.keep(row, kept) < kept:
            return 0
        return kept

    def begin(self, row: int, kept: int, total: int) -> None:
        for session in (self.first, self.second):
            session.begin(row, kept, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        for session, places in zip((self.first, self.second), self.places, strict=True):
            session.prefill(row, tokens_T, _take(features_TF, places, self.width), position)

    def draft(self, roots: CycleInput) -> Draft:
        mine, theirs = self.drafts = self.first.draft(roots), self.second.draft(roots)
        self.twin_BM = matching_nodes(mine, theirs)
        return merge(mine, theirs, self.twin_BM)

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        assert self.drafts is not None
        mine, theirs = self.drafts
        own, other = (_take(seen.features_BNF, places, self.width) for places in self.places)
        self.first.commit(draft, verdict, replace(seen, features_BNF=own))
        N, twin_BN = mine.tree.nodes, _inverse(self.twin_BM, mine.tree.nodes)
        path_BP = _renumber(twin_BN, theirs.tree.nodes).gather(1, verdict.path_BP.clamp(min=0))
        path_BP = torch.where(verdict.path_BP < 0, -1, path_BP)
        turned = TargetOutput(*(torch.cat([x[:, :1], x[:, N:], x[:, 1:N]], dim=1) for x in (seen.logits_BNV, other)))
        self.second.commit(merge(theirs, mine, twin_BN), replace(verdict, path_BP=path_BP), turned)

    def end(self, row: int) -> None:
        for session in (self.first, self.second):
            session.end(row)


def _inverse(twin_BM: Tensor, nodes: int) -> Tensor:
    """int64 [B, nodes]: the node whose twin each is, or -1."""
    number_BM = torch.arange(twin_BM.shape[1], device=twin_BM.device).expand_as(twin_BM)
    spare_BN = torch.full((len(twin_BM), nodes + 1), -1, device=twin_BM.device)
    return spare_BN.scatter(1, torch.where(twin_BM < 0, nodes, twin_BM), number_BM)[:, :nodes]


def _renumber(twin_BN: Tensor, nodes: int) -> Tensor:
    """int64: the second session's numbers of the merged tree's nodes; it has `nodes` of its own."""
    order_N = torch.arange(twin_BN.shape[1], device=twin_BN.device)
    mine_BN = torch.where(twin_BN >= 0, twin_BN, nodes - 1 + order_N)  # the root's twin is the root
    theirs_BM = torch.arange(1, nodes, device=twin_BN.device).expand(len(twin_BN), -1)
    return torch.cat([mine_BN, theirs_BM], dim=1)


def _places(own: Sequence[int], union: Sequence[int]) -> list[int] | None:
    """Where a method's features lie among the union's; None: they are the union's."""
    return None if tuple(own) == tuple(union) else [union.index(layer) for layer in own]


def _take(features: Tensor, places: Sequence[int] | None, width: int) -> Tensor:
    """Those of the layers that lie side by side, each `width` wide; None: all of them."""
    if places is None:
        return features
    return torch.cat([features[..., :0], *(features[..., i * width : (i + 1) * width] for i in places)], dim=-1)
