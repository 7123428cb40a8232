"""Verification of draft trees: (Draft, scores of the target, noise) -> Verdict. Pure functions;
this module knows no model.

**Deterministic trees** (`draft.q_BNV` is None). One token is drawn at every node from the target's
distribution p. The path descends as long as the drawn token is one of the node's children; the
first drawn token that is not a child is the bonus. For distinct siblings this equals recursive rejection with
point masses (EAGLE-2's rule: accept child x with p(x), else drop x and renormalise). Acceptance and
distribution are the same, without a loop over siblings. With argmax for the draw it is greedy verification.
`Rule` has the draw and the descent; faster implementations override its methods (`core.ops`).

**Sampled trees** (`draft.q_BNV` given). At a node with distribution p, whose children were sampled without
replacement from q, in node order (SpecInfer, Leviathan et al. 2023, and EAGLE-1, section 4.3):

    for each child x:  accept it with min(1, p(x) / q(x));
                       on rejection  p <- norm(max(0, p - q))  and  q <- norm(q without x)
    no child accepted: the bonus is drawn from what is left of p

**Blocks** (`draft.block_verification`: one chain, sampled from q). The chain is tested as a whole, and the
longest prefix that passes its test is accepted. Expected tokens are never fewer than with the test of each
token above (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", algorithm 2):

    w_0 = 1;   w_n = min(1, w_n-1 p(x_n) / q(x_n))        with p and q of node n - 1
    left_n = max(0, w_n p - q)                            with p and q of node n; q = 0 at the last node
    prefix n passes with |left_n| / (|left_n| + 1 - w_n)  |left_n| is the sum of left_n; the empty prefix always passes
    the bonus is drawn from norm(left_n) at the end of the longest prefix that passes

Greedy rows, and rows of `Draft.deterministic_B`, are verified as deterministic trees, whichever way the other
rows of the batch are verified.
Letters: B rows, N nodes, P nodes on the longest path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Draft, Tree, Verdict

__all__ = ["Rule", "draw_bonus", "verify"]


class Rule:
    """Verification of deterministic trees, in torch. Every faster implementation must return the same."""

    def verify_deterministic(self, draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise) -> Verdict:
        """Verify a deterministic tree: `draw` at every node, then `accept_path`."""
        draw_BN, has_nan_B = self.draw(scores_BNV, draft.tree, position_B, noise)
        if draft.tree.nodes == 1:  # plain decoding
            path_BP, length_B = torch.zeros_like(draw_BN), torch.ones_like(position_B)
            return Verdict(path_BP, draft.tokens_BN, length_B, draw_BN[:, 0], has_nan_B)
        return replace(self.accept_path(draft, draw_BN), has_nan_B=has_nan_B)

    def draw(
        self, scores_BNV: Tensor, tree: Tree, position_B: Tensor, noise: GumbelNoise
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the target's token after each node: argmax(log p + Gumbel noise); the largest score in greedy rows.

        The noise belongs to the position after the node, so nodes of one depth share it.

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
        """Return the path from the root on which each node is the token that was drawn at its parent.
        Siblings have distinct tokens."""
        check_siblings(draft.tree, draft.tokens_BN)
        return verdict_of(draft.tree, draft.tokens_BN, *accepted_nodes(draft.tree, draft.tokens_BN, draw_BN))


def verify(
    draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise, ops: Rule | None = None
) -> Verdict:
    """Return the longest path of the tree that the target accepts, and its bonus token.

    Args:
        scores_BNV: float32; softmax over V is the target's distribution at each node
            (`cycle.node_scores`).
        position_B: int64; absolute position of the root. The token after a node at depth d is drawn
            with the noise of position + d + 1.
        noise: the random numbers of the rows.
        ops: the implementation of draws and paths; None for `Rule`, in torch.
    """
    ops = ops or Rule()
    if draft.q_BNV is None:
        return ops.verify_deterministic(draft, scores_BNV, position_B, noise)
    tree = draft.tree
    draw_BN, _ = ops.draw(scores_BNV, tree, position_B, noise)
    check_siblings(tree, draft.tokens_BN)
    accepted_BN, bonus_B = accepted_nodes(tree, draft.tokens_BN, draw_BN)
    sampled_accepted_BN, sampled_bonus_B = _verify_sampled(draft, draft.q_BNV, scores_BNV, position_B, noise)
    deterministic_B = noise.greedy_B
    if draft.deterministic_B is not None:
        deterministic_B = deterministic_B | draft.deterministic_B
    accepted_BN = torch.where(deterministic_B[:, None], accepted_BN, sampled_accepted_BN)
    bonus_B = torch.where(deterministic_B, bonus_B, sampled_bonus_B)
    return verdict_of(tree, draft.tokens_BN, accepted_BN, bonus_B)


def _verify_sampled(
    draft: Draft, q_BNV: Tensor, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise
) -> tuple[Tensor, Tensor]:
    """Verify the nodes that were sampled from q: the first ones of the tree, whose others are guesses without a q.

    Returns:
        bool [B, N] accepted nodes, the root included; int64 [B] bonus tokens.
    """
    nodes, sampled = draft.tree.nodes, q_BNV.shape[1]
    if sampled < nodes:
        draft = replace(draft, tree=draft.tree.first_nodes(sampled), tokens_BN=draft.tokens_BN[:, :sampled])
    verify_draft = draft.rule or (_verify_block if draft.block_verification else _verify_by_rejection)
    accepted_BN, bonus_B = verify_draft(draft, q_BNV, scores_BNV[:, :sampled], position_B, noise)
    return pad(accepted_BN, (0, nodes - sampled)), bonus_B


def _verify_by_rejection(
    draft: Draft, q_BNV: Tensor, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise
) -> tuple[Tensor, Tensor]:
    """Verify by recursive rejection, node by node down the accepted path, child by child in draw order; all rows at
    once. Returns as `_verify_sampled`."""
    tree = draft.tree
    rows = torch.arange(tree.rows, device=scores_BNV.device)
    node_B = torch.zeros_like(position_B)
    bonus_position_B = position_B + 1
    accepted_BN = tree.parents_BN < 0
    ended_B = torch.zeros_like(noise.greedy_B)
    bonus_BV = torch.zeros_like(scores_BNV[:, 0])
    for _ in range(tree.max_depth + 1):
        p_BV = scores_BNV[rows, node_B].softmax(-1)
        q_BV = q_BNV[rows, node_B]
        next_B = node_B
        descended_B = ended_B
        for sibling, child_B, exists_B in _children(tree, node_B):
            token_B = draft.tokens_BN[rows, child_B]
            p_token_B = p_BV[rows, token_B]
            q_token_B = q_BV[rows, token_B]
            tested_B = exists_B & ~descended_B & (q_token_B > 0)
            taken_B = tested_B & noise.accepts(p_token_B / q_token_B, bonus_position_B, sibling)
            refused_B1 = (tested_B & ~taken_B)[:, None]
            p_BV = torch.where(refused_B1, _residual(p_BV, q_BV), p_BV)
            q_BV = torch.where(refused_B1, _without(q_BV, token_B), q_BV)
            next_B = torch.where(taken_B, child_B, next_B)
            descended_B = descended_B | taken_B
        ends_here_B = ~ended_B & (next_B == node_B)
        bonus_BV = torch.where(ends_here_B[:, None], p_BV, bonus_BV)
        ended_B = ended_B | ends_here_B
        bonus_position_B = torch.where(ended_B, bonus_position_B, bonus_position_B + 1)
        node_B = torch.where(ended_B, node_B, next_B)
        accepted_BN = accepted_BN.scatter(1, node_B[:, None], True)
    return accepted_BN, draw_bonus(bonus_BV, bonus_position_B, noise)


def _verify_block(
    draft: Draft, q_BNV: Tensor, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise
) -> tuple[Tensor, Tensor]:
    """Verify a block: test every prefix of the chain with a uniform number of its own, and accept the longest that
    passes. The words w, left and passes are explained at the top of this file. Returns as `_verify_sampled`.

    The numbers are keyed by (position of the root, length of the prefix). If they were keyed by a
    token's absolute position, the next cycle would read the numbers of the failed longer prefixes
    again, although their outcome is known by then.
    """
    tree = draft.tree
    last = tree.nodes - 1
    order_N = torch.arange(tree.nodes, device=position_B.device)
    torch._assert_async((tree.parents_BN == order_N - 1).all(), "block verification needs a chain")
    w_B = torch.ones_like(scores_BNV[:, 0, 0])
    exists_B = tree.acceptable_BN[:, 0]  # whether the row's chain has node n
    length_B = torch.zeros_like(position_B)  # of the longest prefix that has passed
    bonus_BV = torch.zeros_like(scores_BNV[:, 0])
    for n in range(tree.nodes):
        p_BV = scores_BNV[:, n].softmax(-1)
        next_B1 = draft.tokens_BN[:, min(n + 1, last), None]
        p_next_B = p_BV.gather(1, next_B1)[:, 0]
        q_next_B = q_BNV[:, n].gather(1, next_B1)[:, 0]
        next_exists_B = torch.zeros_like(exists_B)
        if n < last:
            next_exists_B = exists_B & tree.acceptable_BN[:, n + 1] & (q_next_B > 0)
        q_BV = torch.where(next_exists_B[:, None], q_BNV[:, n], 0.0)
        left_BV = (w_B[:, None] * p_BV - q_BV).clamp(min=0)
        mass_B = left_BV.sum(-1)
        passes_B = exists_B  # the empty prefix always passes
        if n > 0:
            chance_B = mass_B / (mass_B + 1 - w_B)
            passes_B = exists_B & noise.accepts(chance_B, position_B, n, GumbelNoise.BLOCK)
        length_B = torch.where(passes_B, n, length_B)
        left_BV = torch.where(mass_B[:, None] > 0, left_BV, p_BV)  # rounding may leave no mass
        bonus_BV = torch.where(passes_B[:, None], left_BV, bonus_BV)
        w_next_B = (w_B * p_next_B / q_next_B).clamp(max=1)
        w_B = torch.where(next_exists_B, w_next_B, w_B)
        exists_B = next_exists_B
    accepted_BN = order_N <= length_B[:, None]
    return accepted_BN, draw_bonus(bonus_BV, position_B + length_B + 1, noise)


def draw_bonus(weights_BV: Tensor, position_B: Tensor, noise: GumbelNoise) -> Tensor:
    """Return a token of each row, drawn in proportion to the weights with the noise of its position."""
    gumbel_BV = noise.gumbel(position_B[:, None], weights_BV.shape[-1])[:, 0]
    return (weights_BV.log() + gumbel_BV).argmax(-1)


def _children(tree: Tree, node_B: Tensor) -> list[tuple[int, Tensor, Tensor]]:
    """Return the children of one node of each row: (sibling number, child node [B], whether the row has
    that child [B]), in node order."""
    is_child_BN = (tree.parents_BN == node_B[:, None]) & tree.acceptable_BN
    rank_BN = is_child_BN.cumsum(-1)
    children = []
    for sibling in range(int(rank_BN[:, -1].max())):
        is_sibling_BN = is_child_BN & (rank_BN == sibling + 1)
        children.append((sibling, is_sibling_BN.int().argmax(-1), is_sibling_BN.any(-1)))
    return children


def _residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """Return norm(max(0, p - q)); p itself if rounding leaves no mass."""
    rest_BV = (p_BV - q_BV).clamp(min=0)
    mass_B1 = rest_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, rest_BV / mass_B1, p_BV)


def _without(q_BV: Tensor, token_B: Tensor) -> Tensor:
    """Return norm(q without the token). All zero if nothing is left: later siblings then fail their tests."""
    rest_BV = q_BV.scatter(1, token_B[:, None], 0.0)
    mass_B1 = rest_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, rest_BV / mass_B1, 0.0)


def accepted_nodes(tree: Tree, tokens_BN: Tensor, draw_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accepted nodes, bool [B, N], and the bonus, int64 [B]. A node is accepted if it and its ancestors
    were drawn at their parents."""
    is_root_BN = tree.parents_BN < 0
    at_parent_BN = draw_BN.gather(1, tree.parents_BN.clamp(min=0))
    drawn_BN = is_root_BN | ((tokens_BN == at_parent_BN) & tree.acceptable_BN)
    accepted_BN = (drawn_BN[:, None] | ~tree.mask_BNN).all(-1)
    last_B1 = (accepted_BN * (tree.depth_BN + 1)).argmax(-1, keepdim=True)
    return accepted_BN, draw_BN.gather(1, last_B1)[:, 0]


def verdict_of(tree: Tree, tokens_BN: Tensor, accepted_BN: Tensor, bonus_B: Tensor) -> Verdict:
    """Return the verdict with the accepted nodes as path: they have depths 0, 1, 2, ..."""
    depth_P = torch.arange(tree.max_depth + 1, device=tokens_BN.device)
    on_path_BPN = accepted_BN[:, None] & (tree.depth_BN[:, None] == depth_P[:, None])
    length_B = accepted_BN.sum(-1)
    path_BP = torch.where(depth_P < length_B[:, None], on_path_BPN.int().argmax(-1), -1)
    tokens_BP = torch.where(path_BP >= 0, tokens_BN.gather(1, path_BP.clamp(min=0)), 0)
    return Verdict(path_BP, tokens_BP, length_B, bonus_B)


def check_siblings(tree: Tree, tokens_BN: Tensor) -> None:
    """Assert that no two acceptable nodes have the same parent and the same token. On a GPU the
    error appears later, as nothing waits for it."""
    same_token_BNN = tokens_BN[:, :, None] == tokens_BN[:, None]
    same_parent_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None]
    both_BNN = tree.acceptable_BN[:, :, None] & tree.acceptable_BN[:, None]
    duplicate = (same_token_BNN & same_parent_BNN & both_BNN).triu(1).any()
    torch._assert_async(~duplicate, "siblings with the same token; unite them before verification")
