"""spectr: SpecTr (Sun et al. 2023, arXiv 2310.15141): a small model draws several chains independently, and k-SEQ
verifies them by optimal transport.

At a node with the target's distribution p, k chains go on with tokens x_1 ... x_k, drawn independently from q (algorithm 3):

    for each chain i:  accept x_i with min(1, p(x_i) / (rho q(x_i)))
    one accepted:      chains with another token end; the others go on from this node
    none accepted:     the bonus is drawn from norm(p - min(q, p / rho) (1 - (1 - beta)^k) / beta)

with beta = sum of min(q, p / rho). The number rho, from 1 to k, solves 1 - (1 - beta)^k = rho beta, where acceptance is
largest while nothing above is negative. A chain alone has rho = 1: speculative sampling. The accepted probability is
at least 1 - 1/e of the best that any rule could accept for k independent draws (theorem 3).

Chains with equal tokens so far share nodes, so the target reads them once. Greedy rows have the k best first tokens, as a
deterministic tree. So have rows of which the request limits the nodes: the number of nodes that chains share depends on
their tokens, and the choice of the kept nodes must not.

Letters: B rows, K chains, L levels of draft tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput
from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Choices, Draft, Tree
from eyas.core.verify import draw_bonus
from eyas.drafters import small_model
from eyas.drafters.tools import DraftNetSteps, check_whole, grow_static
from eyas.errors import OptionError

__all__ = ["Method", "Options", "k_seq", "transport", "united"]

HALVINGS = 20  # of the interval in which rho is sought


@dataclass(frozen=True)
class Options(small_model.Options):
    """Options of spectr."""

    drafts: int = 4
    """Chains that are drawn independently."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("", 1, drafts=self.drafts)
        if self.dynamic.is_used or self.tree != small_model.Chain() or self.verification != "token":
            raise OptionError(
                "spectr draws chains and verifies them by k-SEQ: leave dynamic, tree and verification out"
            )

    def choices(self) -> Choices:
        return tuple((i, *(0,) * level) for level in range(self.depth or small_model.DEPTH) for i in range(self.drafts))


def united(draft: Draft, chains: int) -> Draft:
    """Return a draft of independent chains, level by level, in which chains with equal tokens so far share nodes. The
    nodes of later ones are padding."""
    B, N = draft.tokens_BN.shape
    alike_BKK = torch.ones(B, chains, chains, dtype=torch.bool, device=draft.tokens_BN.device)
    own_K = torch.arange(chains, device=alike_BKK.device)
    nodes, parents = list[Tensor](), [torch.full_like(draft.tokens_BN[:, :1], -1)]
    is_first = [torch.ones_like(draft.tokens_BN[:, :1], dtype=torch.bool)]
    for first in range(1, N, chains):
        parents.append(nodes[-1] if nodes else torch.zeros_like(draft.tokens_BN[:, :chains]))
        token_BK = draft.tokens_BN[:, first : first + chains]
        alike_BKK = alike_BKK & (token_BK[:, :, None] == token_BK[:, None])
        chain_BK = alike_BKK.int().argmax(-1)
        nodes.append(first + chain_BK)
        is_first.append(chain_BK == own_K)
    acceptable_BN = draft.tree.acceptable_BN & torch.cat(is_first, dim=1)
    tree = Tree.build(torch.cat(parents, dim=1), draft.tree.max_depth, acceptable_BN)
    return replace(draft, tree=tree, rule=partial(k_seq, torch.stack(nodes, dim=-1)))


def k_seq(
    node_BKL: Tensor, draft: Draft, q_BNV: Tensor, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise
) -> tuple[Tensor, Tensor]:
    """Verify independent chains (`Draft.rule`). Returns the accepted nodes, bool [B, N], and bonus tokens, int64 [B].

    Args:
        node_BKL: the nodes of each chain.
    """
    B, K, L = node_BKL.shape
    rows, order_K = (torch.arange(size, device=node_BKL.device) for size in (B, K))
    accepted_BN, node_B = draft.tree.parents_BN < 0, torch.zeros_like(position_B)
    alive_BK, open_B = torch.ones_like(node_BKL[..., 0], dtype=torch.bool), torch.ones_like(noise.greedy_B)
    bonus_BV, bonus_position_B = torch.zeros_like(scores_BNV[:, 0]), position_B
    for level in range(L + 1):
        p_BV, q_BV = scores_BNV[rows, node_B].softmax(-1), q_BNV[rows, node_B]
        child_BK = node_BKL[..., min(level, L - 1)]
        token_BK = draft.tokens_BN.gather(1, child_BK)
        q_BK, exists_BK = q_BV.gather(1, token_BK), draft.tree.acceptable_BN.gather(1, child_BK)
        alive_BK = alive_BK & exists_BK & (q_BK > 0) & (level < L)
        rho_B1, left_BV = transport(p_BV, q_BV, alive_BK.sum(-1))
        chance_BK = p_BV.gather(1, token_BK) / (rho_B1 * q_BK)
        passes_BK = alive_BK & noise.accepts(chance_BK, position_B + level + 1, order_K)
        taken_B1 = passes_BK.int().argmax(-1, keepdim=True)  # the first
        ends_B = open_B & ~passes_BK.any(-1)
        bonus_BV = torch.where(ends_B[:, None], left_BV, bonus_BV)
        bonus_position_B = torch.where(ends_B, position_B + level + 1, bonus_position_B)
        open_B = open_B & ~ends_B
        node_B = torch.where(open_B, child_BK.gather(1, taken_B1)[:, 0], node_B)
        accepted_BN = accepted_BN.scatter(1, node_B[:, None], True)
        alive_BK = alive_BK & open_B[:, None] & (token_BK == token_BK.gather(1, taken_B1))
    return accepted_BN, draw_bonus(bonus_BV, bonus_position_B, noise)


def transport(p_BV: Tensor, q_BV: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho [B, 1], and the weights of the bonus [B, V], for this number of draws."""
    p_BV, q_BV, count_B1 = p_BV.double(), q_BV.double().nan_to_num(), count_B[:, None].double()

    def overlap(rho_B1: Tensor) -> Tensor:
        return torch.minimum(q_BV, p_BV / rho_B1).sum(-1, keepdim=True).clamp(max=1)

    low_B1, high_B1 = torch.ones_like(count_B1), count_B1.clamp(min=1)  # at `high` nothing is negative
    for _ in range(HALVINGS):
        middle_B1 = (low_B1 + high_B1) / 2
        beta_B1 = overlap(middle_B1)
        suffices_B1 = 1 - (1 - beta_B1) ** count_B1 <= middle_B1 * beta_B1
        low_B1, high_B1 = torch.where(suffices_B1, low_B1, middle_B1), torch.where(suffices_B1, middle_B1, high_B1)
    beta_B1 = overlap(high_B1)
    share_B1 = torch.where(beta_B1 > 0, (1 - (1 - beta_B1) ** count_B1) / beta_B1, 0.0)
    left_BV = (p_BV - torch.minimum(q_BV, p_BV / high_B1) * share_B1).clamp(min=0)
    left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)  # rounding may leave no mass
    return high_B1, left_BV.float()


class Method(small_model.Method):
    """A small model that draws several chains."""

    Options: ClassVar[type] = Options
    summary = "SpecTr: a small model draws several chains, verified by optimal transport (k-SEQ)"
    trainable = False

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        draft = grow_static(net_steps, cycle_input, self.choices, "independent")
        if draft.q_BNV is None:
            return draft
        limits = cycle_input.draft_limits or [None] * len(draft.tokens_BN)
        limited_B = torch.tensor([limit is not None for limit in limits], device=draft.tokens_BN.device)
        return replace(united(draft, self.options.drafts), deterministic_B=limited_B)

    def chain(self, depth: int) -> Any:
        return small_model.Method(self.target, small_model.Options(depth=depth), self.draft_model)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "choices": f"{self.options.drafts} chains", "verification": "k-SEQ"}
