"""The operations of a cycle that a runner may replace by faster ones: here the reference, in torch.

Each runner has its operations (`Runner.ops`): runners/cpu_ops.py has those of the CPU kernels,
runners/gpu_ops.py those of the GPU kernels. Every implementation must return the results of this
one: the same draws, paths and caches.

Letters: B rows, N nodes, P nodes on the longest path, V vocabulary, v draft vocabulary, D
hidden, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.adjustments import Adjustments
from eyas.core.cache import commit_path
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling_rows
from eyas.core.tree import Draft, Tree, Verdict

__all__ = [
    "REFERENCE",
    "Backend",
    "Ops",
    "accepted_nodes",
    "check_siblings",
    "verdict_of",
]


Backend = str | Callable[..., Any]
"""A backend of torch.compile."""


class Ops:
    """The reference implementation of every operation, in torch.

    Attributes:
        draft_formats: weight formats that `draft_net` supports.
    """

    draft_formats: tuple[str, ...] = ("exact",)

    def noise(self, sampling: Sequence[Sampling | None], device: torch.device | str = "cpu") -> GumbelNoise:
        """The random numbers of rows with these samplings; None is an empty row."""
        return GumbelNoise.of(sampling, device)

    def scores(self, logits_BNV: Tensor, sampling: Sequence[Sampling], adjustments: Adjustments | None) -> Tensor:
        """See `core.sampling.apply_sampling_rows`. Logits that nothing changes may keep their
        dtype."""
        return apply_sampling_rows(logits_BNV, sampling, adjustments)

    def verify_deterministic(self, draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise) -> Verdict:
        """Verify a deterministic tree: `draw` at every node, then `accept_path`."""
        draw_BN, has_nan_B = self.draw(scores_BNV, draft.tree, position_B, noise)
        if draft.tree.nodes == 1:  # plain decoding
            return Verdict(
                torch.zeros_like(draw_BN), draft.tokens_BN, torch.ones_like(position_B), draw_BN[:, 0], has_nan_B
            )
        return replace(self.accept_path(draft, draw_BN), has_nan_B=has_nan_B)

    def draw(
        self, scores_BNV: Tensor, tree: Tree, position_B: Tensor, noise: GumbelNoise
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the target's token after each node: argmax(log p + Gumbel noise); the largest score
        in greedy rows.

        The noise is that of the position after the node, so nodes of one depth share it.

        Args:
            position_B: int64; absolute position of the root.

        Returns:
            int64 [B, N] tokens; bool [B], rows with NaN among their scores, or None if the
            implementation does not check.
        """
        if noise.all_greedy:
            return scores_BNV.argmax(-1), None
        position_BP = position_B[:, None] + torch.arange(1, tree.max_depth + 2, device=position_B.device)
        logp_BNV = torch.where(noise.greedy_B[:, None, None], scores_BNV, scores_BNV.log_softmax(-1))
        gumbel_BPV = noise.gumbel(position_BP, scores_BNV.shape[-1])
        depth_BNV = tree.depth_BN[..., None].expand_as(scores_BNV)
        return (logp_BNV + gumbel_BPV.gather(1, depth_BNV)).argmax(-1), None

    def accept_path(self, draft: Draft, draw_BN: Tensor) -> Verdict:
        """The path from the root on which each node is the token that was drawn at its parent.
        Siblings have distinct tokens."""
        check_siblings(draft.tree, draft.tokens_BN)
        return verdict_of(draft.tree, draft.tokens_BN, *accepted_nodes(draft.tree, draft.tokens_BN, draw_BN))

    def commit(self, store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
        """See `core.cache.commit_path`."""
        commit_path(store, length_B, path_BP)

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        """Return a draft net for decoding.

        Args:
            draft_weights: one of `draft_formats`. "exact": as the net is; CPU kernels round it then
                too, to int8 weights and 16-bit activations.
        """
        return net

    def fused_tree_builder(
        self, target: Any, net: nn.Module, embeddings: Tensor | None, draft_ids_v: Tensor | None
    ) -> Any:
        """Return a function that grows dynamic trees of this net in one call, a
        `drafters._grow.FusedTreeBuilder`; None: they are grown level by level.

        Args:
            target: the `Target` that the net drafts for.
            net: an EAGLE net as `draft_net` returned it.
            embeddings: [V, D], the net's own embedding table; None: the target's.
            draft_ids_v: int64; the target's ids of a draft vocabulary that is smaller than the
                target's.
        """
        return None


REFERENCE = Ops()


def accepted_nodes(tree: Tree, tokens_BN: Tensor, draw_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted nodes, bool [B, N], and the bonus, int64 [B]. A node is accepted if it and its
    ancestors were drawn at their parents."""
    drawn_BN = (tokens_BN == draw_BN.gather(1, tree.parents_BN.clamp(min=0))) & tree.acceptable_BN
    drawn_BN = drawn_BN | (tree.parents_BN < 0)
    accepted_BN = (drawn_BN[:, None] | ~tree.mask_BNN).all(-1)
    last_B1 = (accepted_BN * (tree.depth_BN + 1)).argmax(-1, keepdim=True)
    return accepted_BN, draw_BN.gather(1, last_B1)[:, 0]


def verdict_of(tree: Tree, tokens_BN: Tensor, accepted_BN: Tensor, bonus_B: Tensor) -> Verdict:
    """The verdict with the accepted nodes as path: they have depths 0, 1, 2, ..."""
    depth_P = torch.arange(tree.max_depth + 1, device=tokens_BN.device)
    on_path_BPN = accepted_BN[:, None] & (tree.depth_BN[:, None] == depth_P[:, None])
    length_B = accepted_BN.sum(-1)
    path_BP = torch.where(depth_P < length_B[:, None], on_path_BPN.int().argmax(-1), -1)
    tokens_BP = torch.where(path_BP >= 0, tokens_BN.gather(1, path_BP.clamp(min=0)), 0)
    return Verdict(path_BP, tokens_BP, length_B, bonus_B)


def check_siblings(tree: Tree, tokens_BN: Tensor) -> None:
    """Assert that no two acceptable nodes have the same parent and the same token. On a GPU the
    error appears later, as nothing waits for it."""
    same_BNN = (tokens_BN[:, :, None] == tokens_BN[:, None]) & (tree.parents_BN[:, :, None] == tree.parents_BN[:, None])
    both_BNN = tree.acceptable_BN[:, :, None] & tree.acceptable_BN[:, None]
    duplicate = (same_BNN & both_BNN).triu(1).any()
    torch._assert_async(~duplicate, "siblings with the same token; unite them before verification")
