"""vanilla: the baseline is a drafter that proposes nothing. Its tree is the root alone, and a cycle
emits one token."""

from __future__ import annotations

import torch

from eyas.core.drafter import Capturable, CycleInput, DraftSession
from eyas.core.tree import Draft, Tree
from eyas.drafters._method import DraftMethod

__all__ = ["Method"]


class Session(DraftSession):
    """Drafts nothing."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tree = Tree.chain(rows, 1, device)

    def capturable(self, cycle_input: CycleInput) -> Capturable:
        return Capturable(self, {})

    def truncate(self, row: int, length: int) -> int:
        return length

    def copy(self, source: int, row: int, length: int) -> int:
        return length

    def draft(self, cycle_input: CycleInput) -> Draft:
        return Draft(self.tree, cycle_input.tokens_B[:, None])


class Method(DraftMethod):
    """Plain decoding."""

    summary = "plain decoding, one token a cycle: what every speed-up is measured against"

    def open(self, rows: int) -> DraftSession:
        return Session(rows, self.target.device)
