"""vanilla: the baseline is a drafter that proposes nothing. Its tree is the root alone; a cycle emits one token."""

from __future__ import annotations

from eyas.drafters._base import Drafter, DraftSession, Roots
from eyas.tree import Draft, Tree

__all__ = ["Method"]


class Session(DraftSession):
    def keep(self, row: int, length: int) -> int:
        return length

    def draft(self, roots: Roots) -> Draft:
        return Draft(Tree.chain(len(roots.tokens_B), 1, roots.tokens_B.device), roots.tokens_B[:, None])


class Method(Drafter):
    summary = "plain decoding, one token a cycle: what every speed-up is measured against"

    def open(self, rows: int) -> DraftSession:
        return Session()
