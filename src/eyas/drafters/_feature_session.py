"""A session for methods that read one feature of the target and no text.

Letters: B rows, N nodes, P nodes of a path, D hidden, F features, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas.core.drafter import Capturable, CycleInput, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict

__all__ = ["FeatureSession"]


class FeatureSession(DraftSession):
    """Keeps the target's feature of each row's newest committed token, and nothing else."""

    def __init__(self, rows: int, target: Target, grow: Callable[[Tensor, CycleInput], Draft]) -> None:
        """`grow` returns the draft for (feature_BD, cycle_input)."""
        self.grow = grow
        self.feature_BD = torch.zeros(rows, target.hidden_size, dtype=target.dtype, device=target.device)

    def capturable(self, cycle_input: CycleInput) -> Capturable:
        return Capturable(self, {"feature_BD": tuple(self.feature_BD.shape)})

    def truncate(self, row: int, length: int) -> int:
        return length  # the prompt's last token is always read again

    def copy(self, source: int, row: int, length: int) -> int:
        return length

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self.feature_BD[row] = features_TF[-1]

    def clear(self, row: int) -> None:
        self.feature_BD[row] = 0

    def draft(self, cycle_input: CycleInput) -> Draft:
        return self.grow(self.feature_BD, cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        last_B1 = verdict.path_BP.gather(1, verdict.length_B[:, None] - 1)
        features_BNF = output.features_BNF
        self.feature_BD = features_BNF.gather(1, last_B1[..., None].expand(-1, -1, features_BNF.shape[-1]))[:, 0]
