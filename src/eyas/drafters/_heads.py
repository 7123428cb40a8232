"""What methods with one head per token ahead have in common (Medusa, Hydra): fixed trees by rank, the session that keeps one feature a row,
the loss of all heads. Their children are chosen, not drawn.

Letters: B rows, N nodes (M without the root), Q nodes of a level, W ranks, D hidden, V vocabulary; in training N tokens, M that count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.drafter import Batch, Capturable, CycleInput, DraftSession, Loss
from eyas.core.sampling import apply_sampling
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, TargetOutput, Tree, Verdict
from eyas.errors import CheckpointError, OptionError, near
from eyas.losses import draft_cross_entropy

__all__ = [
    "FeatureSession", "Objective", "RankTree", "best_children", "check_head", "check_objective", "heads_loss", "lm_head_like"
]  # fmt: skip

Objective = Literal["tokens", "law"]
OBJECTIVES = ("tokens", "law")


# --- trees by rank ---------------------------------------------------------------------------------------------------------------------


class RankTree:
    """A fixed tree in tensors: below the root, node after node, its level and its rank among its parent's children."""

    def __init__(self, choices: Choices, device: torch.device) -> None:
        number = {(): 0} | {path: n for n, path in enumerate(choices, start=1)}
        self.choices, self.depth = choices, max(map(len, choices))
        self.width = 1 + max(path[-1] for path in choices)
        self.parents_N = torch.tensor([-1, *(number[path[:-1]] for path in choices)], device=device)
        self.flat_M = torch.tensor([(len(path) - 1) * self.width + path[-1] for path in choices], device=device)  # level * width + rank

    def draft(self, roots: CycleInput, tokens_BM: Tensor, score_BM: Tensor) -> Draft:
        """The tree below the roots with these tokens, which must differ among siblings, and their log q."""
        B = len(roots.tokens_B)
        tree = Tree.build(self.parents_N.expand(B, -1), self.depth)
        scores_BN = F.pad(score_BM, (1, 0))
        return Draft(tree, torch.cat([roots.tokens_B[:, None], tokens_BM], dim=1), scores_BN)


def best_children(logits_BQV: Tensor, roots: CycleInput, noise: str, level_Q: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best children of Q nodes, best first, [B, Q, count]: their tokens, which differ, and log q.

    With shared noise they are ranked by log q + what the target will add where they stand, q processed by the row's own Sampling like p,
    with the row's tokens up to the root as its history.
    """
    if noise == "shared":
        seen = None if roots.history_BV is None else roots.history_BV[:, None].expand(-1, logits_BQV.shape[1], -1)
        rows = enumerate(roots.sampling)
        logits_BQV = torch.stack([apply_sampling(logits_BQV[b], s, None if seen is None else seen[b]) for b, s in rows])
    logq_BQV = logits_BQV.float().log_softmax(-1)
    if noise == "none" or roots.noise.all_greedy:
        own_BQW, token_BQW = logq_BQV.topk(count)
        return token_BQW, own_BQW
    key_BQV = logq_BQV + roots.noise.gumbel(roots.position_B[:, None] + level_Q + 1, logits_BQV.shape[-1])  # zero in greedy rows
    token_BQW = key_BQV.topk(count).indices
    return token_BQW, logq_BQV.gather(-1, token_BQW)


# --- the session -----------------------------------------------------------------------------------------------------------------------


class FeatureSession(DraftSession):
    """All that it knows of a row is the target's feature of its newest committed token."""

    def __init__(self, rows: int, target: Target, grow: Callable[[Tensor, CycleInput], Draft]) -> None:
        """grow: (feature_BD, roots) -> the draft."""
        self.grow = grow
        self.feature_BD = torch.zeros(rows, target.hidden_size, dtype=target.dtype, device=target.device)

    def capturable(self, roots: CycleInput) -> Capturable:
        return Capturable(self, {"feature_BD": tuple(self.feature_BD.shape)})

    def keep(self, row: int, length: int) -> int:
        return length  # the prompt's last token is always offered again

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self.feature_BD[row] = features_TF[-1]

    def draft(self, roots: CycleInput) -> Draft:
        return self.grow(self.feature_BD, roots)

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        last_B1 = verdict.path_BP.gather(1, verdict.length_B[:, None] - 1)
        self.feature_BD = seen.features_BNF.gather(1, last_B1[..., None].expand(-1, -1, seen.features_BNF.shape[-1]))[:, 0]


# --- training --------------------------------------------------------------------------------------------------------------------------


def check_objective(objective: str) -> None:
    if objective not in OBJECTIVES:
        raise OptionError(f"unknown objective {objective!r}; {near(objective, OBJECTIVES)}")


def heads_loss(
    target: Target, batch: Batch, heads: int, guess: Callable[[int, Tensor], tuple[Tensor, Tensor]], decay: float, objective: Objective
) -> Loss:  # fmt: skip
    """Cross-entropy of head k at token t, which foretells token t+2+k and counts when that token does; decay^k of it, summed.

    Sums are told per token that counts for the first head; for further heads a few less count, at the ends of documents.

    Args:
        batch: the target's final features.
        guess: (k, rows_M) -> what head k's lm_head reads at these tokens, [M, D], and that lm_head, [V, D].
        objective: tokens: those that stand in the data; law: what the target would say after the tokens before.
    """
    tokens_N, N = batch.tokens_N, len(batch.tokens_N)
    order_N, end_N = torch.arange(N, device=tokens_N.device), batch.documents.end_N(tokens_N.device)
    total, count, right = torch.zeros((), device=tokens_N.device), torch.zeros((), dtype=torch.long), dict[int, Tensor]()
    for k in range(heads):
        goal_N = order_N + 2 + k
        rows_M = (batch.counted_N[goal_N.clamp(max=N - 1)] & (goal_N < end_N)).nonzero()[:, 0]
        goal_M, M = goal_N[rows_M], len(rows_M)

        def teacher(part: slice, goal_M: Tensor = goal_M) -> Tensor:
            if objective == "law":
                return target.head(batch.features_NF[goal_M[part] - 1].to(target.dtype))
            wanted_C1 = tokens_N[goal_M[part], None]
            nothing_CV = torch.full((len(wanted_C1), target.vocab_size), -torch.inf, device=tokens_N.device)
            return nothing_CV.scatter_(1, wanted_C1, 0.0)  # logits of the law that is sure of this token

        hidden_MD, weight_VD = guess(k, rows_M)
        every_M = torch.arange(M, device=tokens_N.device)
        found = draft_cross_entropy(hidden_MD, weight_VD, every_M, torch.full_like(every_M, decay**k, dtype=torch.float), M, teacher)
        total, right[k] = total + found.total, found.is_correct_K.sum()
        if k == 0:
            count = torch.tensor(M, device=tokens_N.device)
    sums = {"accuracy": right[0]}
    if heads > 1:
        sums[f"accuracy of head {heads}"] = right[heads - 1]
    return Loss(total, count, sums)


# --- weights ---------------------------------------------------------------------------------------------------------------------------


def lm_head_like(target: Target, otherwise: Tensor | None = None) -> Tensor:
    """[V, D]: a head that says what the target's does, but for a softcap; `otherwise` where it is no plain matrix, or an OptionError."""
    weight: Tensor | None = getattr(target.family.head, "weight", None)
    if weight is not None and weight.shape == (target.vocab_size, target.hidden_size):
        return weight.detach() * target.family.logit_scale
    if otherwise is None:
        raise OptionError("the target's head is no plain matrix, so heads cannot be trained through it: give --head.output own")
    return otherwise


def check_head(weights: Weights | None, reads: str, target: Target) -> Weights:
    """The weights, if they are of this method and of the target's sizes; CheckpointError otherwise."""
    if weights is None:
        raise CheckpointError("this method needs a trained head: name its folder or hub id with --draft")
    if weights.method != reads:
        raise CheckpointError(f"{weights.source} holds a head of {weights.method}, not of {reads}")
    for key, name, mine in (("hidden_size", "hidden size", target.hidden_size), ("vocab_size", "vocabulary", target.vocab_size)):
        found = weights.config[key]
        if found is not None and found != mine:
            raise CheckpointError(f"{weights.source}: the heads' {name} is {found}, the target's {mine}: they were made for another model")
    return weights
