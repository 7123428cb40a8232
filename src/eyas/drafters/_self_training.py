"""Training of a net on its own outputs: the options, and the predictions of a training-time test
(EAGLE-3, section 3.2).

Step i (0, 1, ...) at slot t predicts token t+2+i, and counts when that token counts. This module
knows no net.

Letters: N packed tokens, F features, I steps, M slots, K predictions of all steps, U target
positions (tokens that count), D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from eyas.core.options import TRAINING
from eyas.core.target import Target
from eyas.drafters._method import Batch
from eyas.drafters._options import check_choice, check_decay, check_whole
from eyas.losses import DraftLosses
from eyas.objectives import OBJECTIVES

__all__ = ["Predictions", "SelfTraining"]


@dataclass(frozen=True)
class SelfTraining:
    """How a net is trained on its own outputs."""

    steps: Annotated[int, TRAINING] = 4
    """Steps of the training-time test: draft tokens predicted one after another from each slot."""
    decay: Annotated[float, TRAINING] = 0.8
    """Step i weighs decay ** i."""
    objective: Annotated[str, TRAINING] = "distribution"
    """distribution: cross-entropy with the target's distribution; acceptance, hybrid: LK losses,
    which train the probability that a drawn token is accepted."""

    def __post_init__(self) -> None:
        check_whole("ttt", 1, steps=self.steps)
        check_decay("ttt.decay", self.decay)
        check_choice("ttt.objective", self.objective, tuple(OBJECTIVES))


@dataclass(frozen=True)
class Predictions:
    """The predictions that count: prediction k is made at step `step_K[k]`, at slot
    `rows_M[row_K[k]]`, of the token at target position `position_K[k]`."""

    rows_M: Tensor  # int64, ascending: slots from which something is predicted that counts
    step_K: Tensor
    row_K: Tensor
    position_K: Tensor
    # index of the token before each target position: its final feature gives the target's
    # distribution
    before_U: Tensor

    @classmethod
    def from_batch(cls, batch: Batch, steps: int) -> Predictions:
        """Return all predictions of a training-time test of `steps` steps in a batch."""
        counted_N, device = batch.counted_N, batch.counted_N.device
        goal_NI = torch.arange(len(counted_N), device=device)[:, None] + 2 + torch.arange(steps, device=device)
        inside_NI = goal_NI < batch.documents.end_N(device)[:, None]
        counts_NI = counted_N[goal_NI.clamp(max=len(counted_N) - 1)] & inside_NI
        rows_M = counts_NI.any(1).nonzero()[:, 0]
        step_K, row_K = counts_NI[rows_M].T.nonzero(as_tuple=True)
        position_N = counted_N.cumsum(0) - 1  # the target position of a token that counts
        before_U = (counted_N.nonzero()[:, 0] - 1).clamp(min=0)
        return cls(rows_M, step_K, row_K, position_N[goal_NI[rows_M[row_K], step_K]], before_U)

    def target_logits(self, features_NF: Tensor, target: Target) -> Callable[[slice], Tensor]:
        """Return the function from a slice of the target positions to the target's logits there. The
        target's final features are the last ones of `features_NF`."""
        final_ND = features_NF[:, -target.hidden_size :]
        return lambda positions: target.head(final_ND[self.before_U[positions]].to(target.dtype))

    def figures(self, losses: DraftLosses, steps: int) -> dict[str, Tensor]:
        """Return how often the first and the last step are right, and their overlap, summed."""
        sums = {}
        for step in dict.fromkeys((0, steps - 1)):
            suffix, is_here_K = f" at step {step + 1}" if step else "", self.step_K == step
            sums["accuracy" + suffix] = losses.is_correct_K[is_here_K].sum()
            sums["overlap" + suffix] = losses.overlap_K[is_here_K].sum()
        return sums
