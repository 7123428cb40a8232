"""Drafts under constraints: a net's children are ranked among the tokens that the request's
constraint allows.

A constraint is a rule that the target keeps at every node (`RowFeature.mask`), so a child that it
forbids is never accepted. While a tree grows, the masks of the nodes so far are those that
verification will apply: they depend on a node's path alone, so sampled children keep their distribution, too.

This module knows no net and no grammar. Letters: B rows, M nodes so far, Q nodes of a level, V
vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput
from eyas.core.features import RowNodes

__all__ = ["PartialTree", "has_masks", "only_allowed"]


class PartialTree(NamedTuple):
    """A tree that grows, and the nodes whose children are sought."""

    parents_BM: Tensor  # int64; a parent before its children, -1 for the root
    tokens_BM: Tensor  # int64
    nodes_Q: Tensor  # int64; node numbers

    @classmethod
    def root(cls, cycle_input: CycleInput) -> PartialTree:
        """Return the root alone."""
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
