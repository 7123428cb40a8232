"""Documents end to end without padding: a packed sequence of training. Letters: N tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Documents"]


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents of a packed sequence, in tokens."""

    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def begin_N(self, device: torch.device | None = None) -> Tensor:
        """Return, int64, the index of the first token of each token's document."""
        begins = torch.tensor([0, *accumulate(self.lengths)][:-1], dtype=torch.long)
        return begins.repeat_interleave(torch.tensor(self.lengths)).to(device)

    def end_N(self, device: torch.device | None = None) -> Tensor:
        """Return, int64, the index after the last token of each token's document."""
        return torch.tensor(list(accumulate(self.lengths))).repeat_interleave(torch.tensor(self.lengths)).to(device)

    def position_N(self, device: torch.device | None = None) -> Tensor:
        """Return, int64, each token's position within its document."""
        return torch.arange(self.tokens, device=device) - self.begin_N(device)
