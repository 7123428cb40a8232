"""Shared by methods with one head per token ahead (Medusa, Hydra): static trees by rank, the loss
of all heads. Their trees are deterministic.

Letters: B rows, N nodes (M without the root), Q nodes of a level, W ranks, D hidden, V vocabulary; in
training N tokens, M that count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas import elsewhere
from eyas.core.drafter import CycleInput, TreeSize
from eyas.core.options import NEW_HEADS
from eyas.core.sampling import apply_sampling_rows
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, Tree
from eyas.drafters import Batch, Loss
from eyas.drafters.tools import DynamicTree, check_whole
from eyas.errors import OptionError

__all__ = [
    "HeadCount", "HeadsTree", "RankTree", "best_children", "heads_loss", "lm_head_like"
]  # fmt: skip

OBJECTIVES = ("tokens", "distribution")


@dataclass(frozen=True)
class HeadCount:
    """How many heads, and how deep."""

    count: Annotated[int, NEW_HEADS] = 4
    """How many; each predicts one token further ahead."""
    blocks: Annotated[int, NEW_HEADS] = 1
    """Residual blocks in each."""

    def __post_init__(self) -> None:
        check_whole("head", 1, count=self.count, blocks=self.blocks)


# --- trees by rank


class RankTree:
    """A static tree as tensors: for every node below the root its level and its rank among its
    parent's children."""

    def __init__(self, choices: Choices, device: torch.device) -> None:
        number = {(): 0} | {path: n for n, path in enumerate(choices, start=1)}
        self.choices = choices
        self.depth = max(map(len, choices))
        self.width = 1 + max(path[-1] for path in choices)
        self.parents_N = torch.tensor([-1, *(number[path[:-1]] for path in choices)], device=device)
        # level * width + rank
        self.flat_M = torch.tensor([(len(path) - 1) * self.width + path[-1] for path in choices], device=device)

    def draft(self, cycle_input: CycleInput, tokens_BM: Tensor, score_BM: Tensor) -> Draft:
        """Return the tree below the roots with these tokens, which must differ among siblings, and their log q."""
        tree = Tree.build(self.parents_N.expand(len(cycle_input.tokens_B), -1), self.depth)
        tokens_BN = torch.cat([cycle_input.tokens_B[:, None], tokens_BM], dim=1)
        return Draft(tree, tokens_BN, F.pad(score_BM, (1, 0)))


class HeadsTree:
    """The tree that several heads draft: static, or the most probable paths (dynamic).

    Args:
        options: `tree` of the method's options, a `medusa.HeadTreeOptions`.
        heads: one level needs one head.
    """

    def __init__(self, options: Any, heads: int, target: Target) -> None:
        self.options = options
        self.heads = heads
        self.dynamic: DynamicTree | None = options.dynamic(heads)
        self.static = None if self.dynamic else RankTree(options.for_heads(heads, target.vocab_size), target.device)

    @property
    def max_tree(self) -> TreeSize | None:
        return None if self.dynamic is None else self.dynamic.size

    @property
    def depth(self) -> int:
        return self.heads if self.static is None else self.static.depth

    def describe(self) -> dict[str, Any]:
        if self.dynamic is not None:
            return {**self.dynamic.describe(), "heads": self.heads}
        assert self.static is not None
        nodes = 1 + len(self.static.choices)
        return {
            "kind": "static",
            "choices": self.options.choices,
            "nodes": nodes,
            "depth": self.depth,
            "heads": self.heads,
        }


def best_children(
    logits_BQV: Tensor, cycle_input: CycleInput, noise: str, level_Q: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the best children of Q nodes, best first, [B, Q, count]: their tokens, which differ, and log q.

    With coupled noise they are ranked by log q + the noise that the target adds at their positions. Then q is
    processed by the row's own Sampling like p, with the row's tokens up to the root as its history.

    Args:
        level_Q: depth of each node.
    """
    if noise == "coupled":
        adjustments = None if cycle_input.adjustments is None else cycle_input.adjustments.for_depths(level_Q)
        logits_BQV = apply_sampling_rows(logits_BQV, cycle_input.sampling, adjustments)
    log_q_BQV = logits_BQV.float().log_softmax(-1)
    if noise == "none" or cycle_input.noise.all_greedy:
        log_q_BQW, token_BQW = log_q_BQV.topk(count)
        return token_BQW, log_q_BQW
    position_BQ = cycle_input.position_B[:, None] + level_Q + 1
    key_BQV = log_q_BQV + cycle_input.noise.gumbel(position_BQ, logits_BQV.shape[-1])  # zero in greedy rows
    token_BQW = key_BQV.topk(count).indices
    return token_BQW, log_q_BQV.gather(-1, token_BQW)


# --- training


def heads_loss(
    target: Target, batch: Batch, heads: int, read: Callable[[int, Tensor], tuple[Tensor, Tensor]], decay: float,
    objective: str,
) -> Loss:  # fmt: skip
    """Return the sum over heads k of decay^k times the cross-entropy of head k. Head k at token t predicts token
    t+2+k, and counts where the batch counts that token.

    `Loss.count` is the count of the first head. Later heads count a few tokens less, at the ends of documents.

    Args:
        batch: with the target's final features.
        read: (k, rows_M) -> the input of head k's lm_head at these tokens, [M, D], and that lm_head, [V, D].
        objective: tokens: learn the tokens of the data; distribution: learn the target's
            distribution after the tokens before them.
    """
    training = elsewhere.part("losses", "training")
    tokens_N, N, device = batch.tokens_N, len(batch.tokens_N), batch.tokens_N.device
    order_N, end_N = torch.arange(N, device=device), batch.documents.end_N(device)
    total, count = torch.zeros((), dtype=torch.float32, device=device), torch.zeros((), dtype=torch.long)
    right = dict[int, Tensor]()
    for k in range(heads):
        goal_N = order_N + 2 + k
        rows_M = (batch.counted_N[goal_N.clamp(max=N - 1)] & (goal_N < end_N)).nonzero()[:, 0]
        goal_M, M = goal_N[rows_M], len(rows_M)

        def teacher(part: slice, goal_M: Tensor = goal_M) -> Tensor:
            if objective == "distribution":
                return target.head(batch.features_NF[goal_M[part] - 1].to(target.dtype))
            token_C1 = tokens_N[goal_M[part], None]
            logits_CV = torch.full((len(token_C1), target.vocab_size), -torch.inf, device=device)
            return logits_CV.scatter_(1, token_C1, 0.0)  # all mass on the token of the data

        hidden_MD, weight_VD = read(k, rows_M)
        every_M = torch.arange(M, device=device)
        weight_M = torch.full_like(every_M, decay**k, dtype=torch.float)
        guesses = training.draft_losses(hidden_MD, weight_VD, every_M, weight_M, M, teacher)
        total = total + guesses.total
        right[k] = guesses.is_correct_K.sum()
        if k == 0:
            count = torch.tensor(M, device=device)
    sums = {"accuracy": right[0]}
    if heads > 1:
        sums[f"accuracy of head {heads}"] = right[heads - 1]
    return Loss(total, count, sums)


def lm_head_like(target: Target, otherwise: Tensor | None = None) -> Tensor:
    """Return a head [V, D] like the target's, except for a softcap. Where the target's is not a plain matrix, return
    `otherwise`, or raise OptionError without it."""
    weight: Tensor | None = getattr(target.family.head, "weight", None)
    if weight is not None and weight.shape == (target.vocab_size, target.hidden_size):
        return weight.detach().to(target.device) * target.family.logit_scale
    if otherwise is None:
        raise OptionError(
            "the target's head is not a plain matrix, so heads cannot be trained through it: give --head.output own"
        )
    return otherwise
