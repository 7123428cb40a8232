"""A session that may sleep: cycles without a draft cost no more than plain decoding, and are caught up in one pass.

    decision.plain      all busy rows            some of them
    verified            the root alone           what was drafted; the nodes of plain rows are padding
    the session         hears nothing: tokens    drafts for all rows, so it misses nothing, and there is nothing to be
                        and features wait        caught up: a batch has one shape, to leave a row out would save no time

Before the session drafts again, or is asked what it still knows, each row that missed something reads it through `prefill`, in one pass.
No more than `WAITING` tokens wait: a row that reaches them reads them at once, asleep or not. So memory is bounded, nothing is lost, and
no later draft is worse for it; to read them costs what it would cost later anyhow, a few thousandths of the cycles that brought them.

This module knows no policy and no method.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eyas.drafters._base import DraftSession, Roots
from eyas.tree import Draft, Seen, Tree, Verdict

__all__ = ["WAITING", "Sleeper"]

WAITING = 512  # tokens of a row


class Sleeper(DraftSession):
    """Stands between the loop and a session of B rows."""

    def __init__(self, session: DraftSession, rows: int) -> None:
        self.session = session
        self.missed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]  # of each row: (tokens_B, features_BF) of plain cycles
        self.first_B: list[Tensor | None] = [None] * rows  # of each row: positions when the first of them was missed
        self.root: Tree | None = None  # the tree of a plain cycle, once there was one
        self.plain: Roots | None = None  # of the cycle under way, when no row is drafted for

    def keep(self, row: int, length: int) -> int:
        self._catch_up(row)
        return self.session.keep(row, length)

    def begin(self, row: int, kept: int, total: int) -> None:
        self.missed[row] = []
        self.session.begin(row, kept, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self.session.prefill(row, tokens_T, features_TF, position)

    def draft(self, roots: Roots) -> Draft:
        plain = roots.decision.plain
        self.plain = roots if plain.issuperset(roots.busy) and plain else None
        if self.plain:
            self.root = self.root or Tree.chain(len(roots.tokens_B), 1, roots.tokens_B.device)
            return Draft(self.root, roots.tokens_B[:, None])
        for row in roots.busy:
            self._catch_up(row)
        draft = self.session.draft(roots)
        return _without(draft, plain) if plain else draft

    def commit(self, draft: Draft, verdict: Verdict, seen: Seen) -> None:
        if self.plain is None:
            self.session.commit(draft, verdict, seen)
            return
        for row in self.plain.busy:
            if not self.missed[row]:
                self.first_B[row] = self.plain.position_B
            self.missed[row].append((draft.tokens_BN[:, 0], seen.features_BNF[:, 0]))
            if len(self.missed[row]) == WAITING:
                self._catch_up(row)

    def end(self, row: int) -> None:
        self.missed[row] = []
        self.session.end(row)

    def _catch_up(self, row: int) -> None:
        """The session reads what the row missed."""
        missed, first_B = self.missed[row], self.first_B[row]
        if missed and first_B is not None:
            tokens, features = zip(*missed, strict=True)
            tokens_T, features_TF = torch.stack([x_B[row] for x_B in tokens]), torch.stack([x_BF[row] for x_BF in features])
            self.missed[row] = []
            self.session.prefill(row, tokens_T, features_TF, int(first_B[row]))


def _without(draft: Draft, rows: frozenset[int]) -> Draft:
    """The draft with nothing but padding behind the roots of these rows."""
    tree, candidate_BN = draft.tree, draft.tree.candidate_BN.clone()
    candidate_BN[sorted(rows), 1:] = False
    return replace(draft, tree=replace(tree, candidate_BN=candidate_BN))
