"""A session that may sleep: cycles without its drafts cost nothing beside what they are, and are caught up in one pass.

    decision        all busy rows plain     a spare                          some rows plain, or none
    verified        the root alone          what the spare drafted           what was drafted; nodes of plain rows are padding
    the session     hears nothing: accepted tokens and features wait         drafts for all rows, so it misses nothing, and there is
                                                                             nothing to be caught up: a batch has one shape, to leave a
                                                                             row out would save no time

Before the session drafts again, or is asked what it still knows, each row that missed something reads it through `prefill`, in one pass.
No more than `WAITING` places wait, a cycle's longest path being what it takes: a row that reaches them reads them at once, asleep or not.
So memory is bounded, nothing is lost, and no later draft is worse for it; to read them costs what it would cost later anyhow, a few
thousandths of the cycles that brought them. The prompt of a row that enters while the session sleeps waits likewise: many are answered
before it wakes.

A spare is a method of text: it is told what it has not heard when it is about to draft, so it costs nothing until then.

This module knows no policy and no method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict

__all__ = ["WAITING", "DormantSession"]

WAITING = 512  # places of a row


class _Accepted(NamedTuple):
    """What a cycle accepted, in as many places as its longest path might have taken: how many it took, the device knows."""

    tokens_BP: Tensor
    features_BPF: Tensor
    taken_BP: Tensor | None  # bool; the other places are empty; None: there are none

    def of(self, row: int) -> tuple[Tensor, Tensor]:
        tokens_P, features_PF = self.tokens_BP[row], self.features_BPF[row]
        if self.taken_BP is None:
            return tokens_P, features_PF
        place_T = self.taken_BP[row].nonzero()[:, 0]
        return tokens_P[place_T], features_PF[place_T]


@dataclass
class _Missed:
    """What waits for a row to wake."""

    first: int  # position of its first token
    prompt: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (tokens_T, features_TF)
    cycles: list[_Accepted] = field(default_factory=list)
    places: int = 0


class DormantSession(DraftSession):
    """Stands between the loop and a session of B rows. rests: whether the next cycle will go without the session, as far as is known."""

    def __init__(self, session: DraftSession, rows: int, is_dormant: Callable[[], bool] = lambda: False) -> None:
        self.session, self.rows, self.is_dormant = session, rows, is_dormant
        self.missed: list[_Missed | None] = [None] * rows
        self.root: Tree | None = None  # the tree of a plain cycle, once there was one
        self.asleep: CycleInput | None = None  # of the cycle under way, when the session sleeps
        self.fallback: _FallbackSession | None = None  # once one was asked for

    def fixed(self, roots: CycleInput) -> Capturable | None:
        if roots.decision.plain or roots.decision.fallback is not None:
            return None
        for row in roots.active_rows:
            self._catch_up(row)
        return self.session.fixed(roots)

    def keep(self, row: int, length: int) -> int:
        self._catch_up(row)
        return self.session.keep(row, length)

    def begin(self, row: int, kept: int, total: int) -> None:
        self.missed[row] = None
        if self.fallback is not None:
            self.fallback.begin(row, kept)
        self.session.begin(row, kept, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        missed = self.missed[row]
        if (missed is None and not self.is_dormant()) or len(tokens_T) + (missed.places if missed else 0) > WAITING:
            self._catch_up(row)
            self.session.prefill(row, tokens_T, features_TF, position)
            return
        missed = self.missed[row] = missed or _Missed(position)
        missed.prompt.append((tokens_T, features_TF))
        missed.places += len(tokens_T)

    def draft(self, roots: CycleInput) -> Draft:
        plain, fallback = roots.decision.plain, roots.decision.fallback
        alone = bool(plain) and plain.issuperset(roots.active_rows)
        self.asleep = roots if alone or fallback is not None else None
        if alone:
            self.root = self.root or Tree.chain(len(roots.tokens_B), 1, roots.tokens_B.device)
            return Draft(self.root, roots.tokens_B[:, None])
        if fallback is None:
            for row in roots.active_rows:
                self._catch_up(row)
            draft = self.session.draft(roots)
        else:
            if self.fallback is None or self.fallback.drafter is not fallback:
                self.fallback = _FallbackSession(fallback, self.rows)
            draft = self.fallback.draft(roots)
        return _without(draft, plain) if plain else draft

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        if self.asleep is None:
            self.session.commit(draft, verdict, seen)
            return
        accepted = _accepted(draft, verdict, seen)
        for row in self.asleep.active_rows:
            missed = self.missed[row] = self.missed[row] or _Missed(len(self.asleep.row_tokens[row]) - 1)
            missed.cycles.append(accepted)
            missed.places += accepted.tokens_BP.shape[1]
            if missed.places >= WAITING:
                self._catch_up(row)

    def end(self, row: int) -> None:
        self.missed[row] = None
        if self.fallback is not None:
            self.fallback.session.end(row)
        self.session.end(row)

    def _catch_up(self, row: int) -> None:
        """The session reads what the row missed."""
        missed, self.missed[row] = self.missed[row], None
        if missed is not None:
            parts = [*missed.prompt, *(cycle.of(row) for cycle in missed.cycles)]
            tokens_T, features_TF = (torch.cat(column) for column in zip(*parts, strict=True))
            self.session.prefill(row, tokens_T, features_TF, missed.first)


class _FallbackSession:
    """A session that drafts now and then, and is told what it needs for it just before."""

    def __init__(self, drafter: Drafter, rows: int) -> None:
        self.drafter, self.session = drafter, drafter.open(rows)
        self.heard = [0] * rows  # tokens of each row's text
        self.entered = set(range(rows))  # rows whose text is another one, behind the tokens that were heard

    def begin(self, row: int, kept: int) -> None:
        self.heard[row] = min(self.heard[row], kept)
        self.entered.add(row)

    def draft(self, roots: CycleInput) -> Draft:
        for row in roots.active_rows:
            text, heard = roots.row_tokens[row], self.heard[row]
            if row in self.entered:
                heard = self.session.keep(row, heard) if heard else 0
                self.session.begin(row, heard, len(text) - 1)
                self.entered.remove(row)
            if heard < len(text) - 1:
                tokens_T = torch.tensor(text[heard:-1])
                self.session.prefill(row, tokens_T, torch.empty(len(tokens_T), 0), heard)
            self.heard[row] = len(text)  # the root is in `roots`
        return self.session.draft(roots)


def _accepted(draft: Draft, verdict: Verdict, seen: TargetOutput) -> _Accepted:
    nodes = draft.tree.nodes
    if nodes == 1:
        return _Accepted(draft.tokens_BN, seen.features_BNF, None)
    path_BP, features_BPF = verdict.path_BP[:, :nodes], seen.features_BNF  # no path is longer than its tree
    features_BPF = features_BPF.gather(1, path_BP.clamp(min=0)[..., None].expand(-1, -1, features_BPF.shape[-1]))
    return _Accepted(verdict.tokens_BP[:, :nodes], features_BPF, path_BP >= 0)


def _without(draft: Draft, rows: frozenset[int]) -> Draft:
    """The draft with nothing but padding behind the roots of these rows."""
    tree, candidate_BN = draft.tree, draft.tree.candidate_BN.clone()
    candidate_BN[sorted(rows), 1:] = False
    return replace(draft, tree=replace(tree, candidate_BN=candidate_BN))
