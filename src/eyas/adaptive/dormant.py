"""A drafter that adapts: before each cycle a policy decides whether its method drafts, and with which tree.

    decision        all active rows plain    a fallback drafts        some rows plain, or none
    verified        the root alone           the fallback's tree      the method's tree; nodes of plain rows are padding
    the session     is dormant               is dormant               drafts for all rows

While the method's session is dormant, accepted tokens and features are collected. Before it drafts again, or is asked what it
still knows, it reads them through `prefill`, in one pass for each row. At most `WAITING` tokens a row are collected; a row that
reaches them is read at once. So memory is bounded, and later drafts are as good as ever. The prompt of a row that enters while
the session is dormant is collected too. With only some rows plain the session drafts for all of them, as a batch has one shape.

A fallback drafts from the text alone. It reads what is new just before it drafts, so it costs nothing until then.

This module knows no method and no rule by which a policy decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession, Shape, method_name
from eyas.core.requests import Step
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict

__all__ = ["WAITING", "AdaptiveDrafter", "Decision", "DormantSession", "Policy", "adapted"]

WAITING = 512  # places of a row


@dataclass(frozen=True)
class Decision:
    """What a policy wants of a cycle. It is made before anything of the cycle is drafted, so it knows the past only."""

    shape: Shape | None = None  # of a tree that is grown; None: as the drafter's options say
    plain: frozenset[int] = frozenset()  # rows that go without a draft
    why: str = ""  # for people
    fallback: Drafter | None = None  # drafts in the method's place: a method that reads text alone

    @property
    def awake(self) -> bool:
        """Whether the method drafts, for all rows."""
        return self.fallback is None and not self.plain

    def label(self, row: int) -> str:
        """What drafts this row: "plain" (nothing), the fallback's name, "nodes/depth/branch", or "fixed" (as the options say)."""
        if row in self.plain:
            return "plain"
        if self.fallback is not None:
            return method_name(self.fallback)
        return "fixed" if self.shape is None else "/".join(map(str, self.shape))


class Policy(Protocol):
    """Which trees, whose, and whether to draft at all.

    It is asked before a cycle's draft, so it knows what came before and nothing that this cycle draws: also where children are drawn, the
    text keeps the target's distribution.
    """

    def decide(self, cycle_input: CycleInput) -> Decision:
        """For the cycle that begins with this input."""
        ...

    def observe(self, steps: Sequence[Step]) -> None:
        """The Steps of the cycle that was decided about, one of each active row."""
        ...

    def is_dormant(self, rows: int) -> bool:
        """Whether a cycle of so many rows would, as far as is known before it, go without the drafter: then a new row's prompt may wait."""
        return False


class AdaptiveDrafter(Drafter):
    """A drafter under a policy, which keeps what it learns: decoders that follow each other may share one."""

    def __init__(self, drafter: Drafter, policy: Policy) -> None:
        super().__init__(drafter.target, drafter.options)
        self.drafter, self.policy, self.net = drafter, policy, drafter.net
        self.feature_layers, self.trained_length = drafter.feature_layers, drafter.trained_length
        self.model_free, self.target_fingerprint = drafter.model_free, drafter.target_fingerprint

    @property
    def parts(self) -> tuple[Drafter, ...]:  # type: ignore[override]
        return self.drafter.parts or (self.drafter,)

    def open(self, rows: int) -> DraftSession:
        return DormantSession(self.drafter.open(rows), rows, self.policy)

    def describe(self) -> dict[str, object]:
        return self.drafter.describe()


def adapted(drafter: Drafter, policy: Policy | None) -> Drafter:
    """The drafter under this policy; without one, the drafter itself."""
    return drafter if policy is None else AdaptiveDrafter(drafter, policy)


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
    """Stands between the engine and a session of B rows, and asks the policy before every cycle."""

    def __init__(self, session: DraftSession, rows: int, policy: Policy) -> None:
        self.session, self.rows, self.policy = session, rows, policy
        self.decision: Decision | None = None  # about the cycle under way
        self.missed: list[_Missed | None] = [None] * rows
        self.root: Tree | None = None  # the tree of a plain cycle, once there was one
        self.asleep: CycleInput | None = None  # of the cycle under way, when the session sleeps
        self.fallback: _FallbackSession | None = None  # once one was asked for
        self.active_rows: set[int] = set()

    def _decide(self, cycle_input: CycleInput) -> Decision:
        """Once in a cycle."""
        if self.decision is None:
            self.active_rows = set(cycle_input.active_rows)
            self.decision = self.policy.decide(cycle_input)
        return self.decision

    def observe(self, steps: Sequence[Step]) -> None:
        self.decision = None
        self.policy.observe(steps)

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        decision = self._decide(cycle_input)
        if not decision.awake:
            return None
        for row in cycle_input.active_rows:
            self._catch_up(row)
        capturable = self.session.capturable(replace(cycle_input, tree_shape=decision.shape))
        return capturable and replace(capturable, tree_shape=decision.shape)

    def keep(self, row: int, length: int) -> int:
        self._catch_up(row)
        return self.session.keep(row, length)

    def begin(self, row: int, kept: int, total: int) -> None:
        self.missed[row] = None
        self.active_rows.add(row)
        if self.fallback is not None:
            self.fallback.begin(row, kept)
        self.session.begin(row, kept, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        missed = self.missed[row]
        if (missed is None and not self.policy.is_dormant(len(self.active_rows))) or len(tokens_T) + (
            missed.places if missed else 0
        ) > WAITING:
            self._catch_up(row)
            self.session.prefill(row, tokens_T, features_TF, position)
            return
        missed = self.missed[row] = missed or _Missed(position)
        missed.prompt.append((tokens_T, features_TF))
        missed.places += len(tokens_T)

    def draft(self, roots: CycleInput) -> Draft:
        decision = self._decide(roots)
        plain, fallback, roots = decision.plain, decision.fallback, replace(roots, tree_shape=decision.shape)
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
        self.active_rows.discard(row)
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
