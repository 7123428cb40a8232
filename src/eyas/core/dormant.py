"""Drafting that may pause: before each cycle a policy and the requests decide whether a method drafts, and with which
tree (`plan_cycle`).

    decision              all active rows plain    a fallback drafts        some rows plain, or none
    tree to be verified   the root alone           the fallback's tree      the method's tree; nodes of plain rows are padding
    method's session      is dormant               is dormant               drafts for all rows

The wishes of requests are applied to that tree (core/row_drafts.py). While the answers of all rows follow their
continuations for many tokens, the method is dormant: its own tree could add little.

A method that drafts from the text alone, as a fallback does, may be given a chooser
(`Decision.chooser`): it drafts in every cycle. The chooser decides which of its nodes are verified. If it takes
none of a fallback's, the cycle may be the method's (`Decision.otherwise`).

While the method's session is dormant, accepted tokens and their features are stored here, and so is the prompt of a
new row. Before the session drafts again, or when a new prompt shares a prefix with its text (`truncate`), it reads
the stored tokens with `prefill`, in one call for each row. A row for which `MAX_STORED_TOKENS` tokens are stored is
read at once, and a longer prompt is not stored at all. So memory is bounded, no call takes long, and later drafts
are the same as without the pause. A row whose request has ended is read too if the session has drafted for it.
`prefill` continues after its last `commit`, and the next `commit`, made for all rows, overwrites that state.

A request without drafts (`Request.drafting`) makes its row plain in every cycle. The policy is not asked about
cycles in which all rows are plain for that reason.

A fallback drafts from the text alone. It reads the new text just before it drafts, so it costs
nothing while it does not draft.

This module knows no method, no policy and no feature.
Letters: B rows, P places of the longest path, T tokens, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession, NodeChooser, TreeSize, method_name
from eyas.core.features import Continuation
from eyas.core.requests import Step
from eyas.core.row_drafts import add_continuations, continuations_of, guides_of, is_confident, limit_nodes
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict

__all__ = [
    "ARM_OFF", "MAX_STORED_TOKENS", "AdaptiveDrafter", "CyclePlan", "Decision", "DormantSession", "Policy", "plan_cycle",
    "with_policy",
]  # fmt: skip

ARM_OFF = "off"  # the arm of cycles that are plain because no request in them wants drafts
MAX_STORED_TOKENS = 512  # most tokens that are stored for a row, padding included


@dataclass(frozen=True)
class Decision:
    """A policy's decision about one cycle, made before the cycle drafts anything."""

    tree_size: TreeSize | None = None  # size of a dynamic tree; None: the drafter's options decide
    plain: frozenset[int] = frozenset()  # rows without a draft
    # name of the choice, for `Policy.observe`: an arm of its bandit, such as "base" or "draft", or
    # another name, such as "explore"
    arm: str = ""
    fallback: Drafter | None = None  # a method that drafts from the text alone, in the method's place
    chooser: NodeChooser | None = None  # for a method that `chooses_nodes`; None: all of its nodes are verified
    # the decision about a cycle in which the chooser takes no node of the fallback's; None: all rows are plain
    otherwise: Decision | None = None
    predicted: frozenset[int] = frozenset()  # plain rows whose tree is a confident continuation

    @property
    def drafts_every_row(self) -> bool:
        """Whether the method's own draft is verified in every row."""
        return self.fallback is None and not self.plain

    def label(self, row: int) -> str:
        """Return a name for the row's draft: "prediction", "plain" (none), the fallback's name, "nodes/depth/branch",
        or "fixed" (the size that the options give)."""
        if row in self.predicted:
            return "prediction"
        if row in self.plain:
            return "plain"
        if self.fallback is not None:
            return method_name(self.fallback)
        return "fixed" if self.tree_size is None else "/".join(map(str, self.tree_size))


FIXED = Decision()


class Policy(Protocol):
    """Decides for each cycle which method drafts, if any, and how large a tree.

    It decides before the cycle's draft, from earlier cycles only. So sampled trees keep the
    target's distribution too.
    """

    def decide(self, cycle_input: CycleInput) -> Decision:
        """Return the decision about the cycle that begins with this input."""
        ...

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from the Steps of the cycle that was decided about, one for each active row."""
        ...

    def observe_prompt(self, tokens: int, seconds: float | None) -> None:
        """Learn the cost of a prompt that the method reads only because it drafts.

        Args:
            tokens: number of tokens of the prompt, or of a chunk of it.
            seconds: the time that the method took to read them; None if they are stored, as it is
                dormant.
        """
        return

    def is_dormant(self, rows: int) -> bool:
        """Return whether the method is expected not to draft the next cycle of `rows` rows: then the
        prompt of a new row may be stored."""
        return False


class AdaptiveDrafter(Drafter):
    """A drafter and its policy. The policy keeps its estimates from one decoder to the next."""

    def __init__(self, drafter: Drafter, policy: Policy) -> None:
        super().__init__(drafter.target, drafter.options)
        self.drafter, self.policy, self.net = drafter, policy, drafter.net
        self.feature_layers, self.model_free = drafter.feature_layers, drafter.model_free

    @property
    def parts(self) -> tuple[Drafter, ...]:  # type: ignore[override]
        """The drafters inside: the parts of a combined drafter, or the one that is wrapped."""
        return self.drafter.parts or (self.drafter,)

    def open(self, rows: int) -> DraftSession:
        return DormantSession(self, rows)

    def describe(self) -> dict[str, object]:
        return self.drafter.describe()


def with_policy(drafter: Drafter, policy: Policy | None) -> Drafter:
    """Return the drafter with this policy; the drafter itself if there is none."""
    return drafter if policy is None else AdaptiveDrafter(drafter, policy)


class _Accepted(NamedTuple):
    """The accepted tokens of a cycle and their features, padded to the longest path, because the
    host does not know the lengths yet."""

    tokens_BP: Tensor
    features_BPF: Tensor
    accepted_BP: Tensor | None  # bool; False: padding; None: there is no padding

    def without_padding(self, row: int) -> tuple[Tensor, Tensor]:
        """Return (tokens_T, features_TF) of one row, without padding."""
        tokens_P, features_PF = self.tokens_BP[row], self.features_BPF[row]
        if self.accepted_BP is None:
            return tokens_P, features_PF
        place_T = self.accepted_BP[row].nonzero()[:, 0]
        return tokens_P[place_T], features_PF[place_T]


@dataclass
class _Missed:
    """The tokens and features of one row that the dormant session has not read."""

    first: int  # absolute position of the first token
    prompt: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # chunks of the prompt: (tokens_T, features_TF)
    cycles: list[_Accepted] = field(default_factory=list)
    padded_tokens: int = 0  # number of stored tokens, padding included


@dataclass(frozen=True)
class CyclePlan:
    """The draft of one cycle."""

    cycle_input: CycleInput
    decision: Decision  # the policy's, within the limits of the requests
    asked: Decision | None = None  # the policy's own, from whose result it learns; None: it learns nothing
    fallback_draft: Draft | None = None  # of the fallback, if the decision depended on it
    guided: Collection[int] = ()  # rows whose features guide drafts
    continuations: Mapping[int, Sequence[Continuation]] = field(default_factory=dict)  # of rows that have any
    all_plain: bool = False  # whether neither the method nor a fallback drafts

    @property
    def dormant(self) -> bool:
        """Whether the method's session is dormant."""
        return self.all_plain or self.decision.fallback is not None


Asked = tuple[Decision | None, Draft | None]  # a policy's decision; the fallback's draft, if it depended on that


def plan_cycle(cycle_input: CycleInput, max_tree: TreeSize | None, ask: Callable[[CycleInput], Asked]) -> CyclePlan:
    """Return the cycle's draft.

    Args:
        max_tree: `Drafter.max_tree` of the method.
        ask: asks the policy; not called if no row wants the method's drafts, because it is off or has a confident
            continuation.
    """
    rows, limits = frozenset(cycle_input.active_rows), cycle_input.draft_limits
    guides = guides_of(cycle_input)
    continuations = continuations_of(guides, cycle_input)
    off = frozenset(row for row in rows if limits and limits[row] == 0)
    confident = frozenset(row for row, found in continuations.items() if is_confident(found[0]))
    if rows == off | confident:
        decision = Decision(plain=rows, predicted=confident, arm=ARM_OFF)
        return CyclePlan(cycle_input, decision, None, None, guides, continuations, all_plain=True)
    asked, fallback_draft = ask(cycle_input)
    decision = asked or FIXED
    size = _limited_size([limits[row] for row in rows] if limits else [None], decision.tree_size or max_tree)
    if off or size is not None:
        decision = replace(decision, plain=decision.plain | off, tree_size=size or decision.tree_size)
    asked = None if continuations else asked  # the result is not the policy's own
    return CyclePlan(cycle_input, decision, asked, fallback_draft, guides, continuations, decision.plain >= rows)


def _limited_size(limits: Sequence[int | None], size: TreeSize | None) -> TreeSize | None:
    """Return the size of a dynamic tree if every active row is limited to fewer nodes than the tree of this size has;
    else None."""
    max_limit = max((limit for limit in limits if limit is not None), default=0)
    if size is None or not max_limit or None in limits or max_limit + 1 >= size.nodes:
        return None
    return TreeSize(max_limit + 1, min(max_limit, size.depth), size.branch)


class DormantSession(DraftSession):
    """The session of a drafter, with the wishes of the requests in its rows, and the tokens that the method misses while
    it is dormant.

    Args:
        drafter: a method; or an `AdaptiveDrafter`, whose policy decides about every cycle.
    """

    def __init__(self, drafter: Drafter, rows: int) -> None:
        method, policy = (drafter.drafter, drafter.policy) if isinstance(drafter, AdaptiveDrafter) else (drafter, None)
        self.session, self.rows, self.policy, self.max_tree = method.open(rows), rows, policy, method.max_tree
        self.plan: CyclePlan | None = None  # of the current cycle; None: not made yet
        self.all_off = False  # whether no row of the last planned cycle wanted the method's drafts
        self.missed: list[_Missed | None] = [None] * rows
        self.long_prompt = [False] * rows  # whether the row's prompt is too long to be stored
        self.has_drafted = [False] * rows  # whether the session has drafted for the request that is or was in the row
        self.root_tree: Tree | None = None  # the tree of plain cycles, made at the first one
        self.fallback: _FallbackSession | None = None  # opened when a decision first names a fallback
        self.active_rows: set[int] = set()

    @property
    def decision(self) -> Decision | None:
        """The decision about the current cycle."""
        return None if self.plan is None else self.plan.decision

    def _planned(self, cycle_input: CycleInput) -> CyclePlan:
        """Return the plan of the current cycle, made once, by `capturable` or by `draft`."""
        if self.plan is None:
            self.active_rows = set(cycle_input.active_rows)
            self.plan = plan_cycle(cycle_input, self.max_tree, self._ask)
            self.all_off = self.plan.decision.arm == ARM_OFF
        return self.plan

    def _ask(self, cycle_input: CycleInput) -> Asked:
        """Return the policy's decision: `otherwise`, if no node of the fallback's draft is to be verified."""
        decision = None if self.policy is None else self.policy.decide(cycle_input)
        if decision is None or decision.otherwise is None:
            return decision, None
        draft = self._draft_fallback(decision, cycle_input)
        if len(_rows_without_drafts(draft, cycle_input.active_rows)) == len(cycle_input.active_rows):
            return decision.otherwise, None
        return decision, draft

    def _draft_fallback(self, decision: Decision, cycle_input: CycleInput) -> Draft:
        assert decision.fallback is not None
        if self.fallback is None or self.fallback.drafter is not decision.fallback:
            self.fallback = _FallbackSession(decision.fallback, self.rows)
        return self.fallback.draft(replace(cycle_input, chooser=decision.chooser))

    def observe(self, steps: Sequence[Step]) -> None:
        plan, self.plan = self.plan, None
        if self.policy is not None and plan is not None and plan.asked is not None:
            asked = plan.asked
            self.policy.observe([step if step.decision is asked else replace(step, decision=asked) for step in steps])

    def observe_prompt(self, row: int, tokens: int, seconds: float) -> None:
        if self.policy is not None and not self.all_off and not self.long_prompt[row]:
            self.policy.observe_prompt(tokens, seconds if self.missed[row] is None else None)

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        """Return the session's answer. The session first reads the tokens that it missed, because a recorded
        cycle cannot do that."""
        if cycle_input.draft_limits or guides_of(cycle_input):
            return None
        decision = self._planned(cycle_input).decision
        if not decision.drafts_every_row:
            return None
        self._wake(cycle_input)
        capturable = self.session.capturable(replace(cycle_input, tree_size=decision.tree_size))
        return capturable and replace(capturable, tree_size=decision.tree_size, runs_ahead=self.policy is None)

    def truncate(self, row: int, length: int) -> int:
        self._replay_missed(row)
        return self.session.truncate(row, length)

    def copy(self, source: int, row: int, length: int) -> int:
        self._replay_missed(source)
        if self.fallback is not None:
            self.fallback.read_tokens[row] = 0  # the fallback has read another text in this row
        return self.session.copy(source, row, length)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        self.missed[row], self.has_drafted[row] = None, False
        self.long_prompt[row] = total - cached_tokens > MAX_STORED_TOKENS
        self.active_rows.add(row)
        if self.fallback is not None:
            self.fallback.begin(row, cached_tokens)
        self.session.begin(row, cached_tokens, total)

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        missed = self.missed[row]
        fits = len(tokens_T) + (missed.padded_tokens if missed else 0) <= MAX_STORED_TOKENS
        waits = missed or self.all_off or (self.policy is not None and self.policy.is_dormant(len(self.active_rows)))
        if not waits or self.long_prompt[row] or not fits:
            self._replay_missed(row)
            self.session.prefill(row, tokens_T, features_TF, position)
            return
        missed = self.missed[row] = missed or _Missed(position)
        missed.prompt.append((tokens_T, features_TF))
        missed.padded_tokens += len(tokens_T)

    def draft(self, cycle_input: CycleInput) -> Draft:
        plan = self._planned(cycle_input)
        draft = self._root(cycle_input.tokens_B) if plan.all_plain else self._draft(plan, cycle_input)
        if plan.continuations:
            draft = add_continuations(draft, plan.continuations)
        if plan.guided and draft.q_BNV is not None:
            guided_B = torch.zeros_like(cycle_input.active_B)
            guided_B[sorted(plan.guided)] = True
            others_B = guided_B if draft.deterministic_B is None else draft.deterministic_B
            draft = replace(draft, deterministic_B=guided_B | others_B)
        return limit_nodes(draft, cycle_input.draft_limits) if cycle_input.draft_limits else draft

    def _root(self, tokens_B: Tensor) -> Draft:
        self.root_tree = self.root_tree or Tree.chain(len(tokens_B), 1, tokens_B.device)
        return Draft(self.root_tree, tokens_B[:, None])

    def _draft(self, plan: CyclePlan, cycle_input: CycleInput) -> Draft:
        """Return the tree of the method, or of the fallback, without nodes in plain rows."""
        decision = plan.decision
        if decision.fallback is not None:
            draft = plan.fallback_draft or self._draft_fallback(decision, cycle_input)
        else:
            self._wake(cycle_input)
            if decision is not FIXED:
                cycle_input = replace(cycle_input, tree_size=decision.tree_size, chooser=decision.chooser)
            draft = self.session.draft(cycle_input)
        if decision.chooser is not None:
            without_drafts = _rows_without_drafts(draft, cycle_input.active_rows)
            self.plan = replace(plan, decision=replace(decision, plain=decision.plain | without_drafts))
        return _without_drafts(draft, decision.plain) if decision.plain else draft

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        if self.plan is None or not self.plan.dormant:
            self.session.commit(draft, verdict, output)
            return
        accepted, cycle_input = _accepted(draft, verdict, output), self.plan.cycle_input
        for row in cycle_input.active_rows:
            missed = self.missed[row] = self.missed[row] or _Missed(len(cycle_input.row_tokens[row]) - 1)
            missed.cycles.append(accepted)
            missed.padded_tokens += accepted.tokens_BP.shape[1]
            if missed.padded_tokens >= MAX_STORED_TOKENS:
                self._replay_missed(row)

    def end(self, row: int) -> None:
        self._forget(row)
        self.session.end(row)

    def clear(self, row: int) -> None:
        self._forget(row)
        self.session.clear(row)

    def _forget(self, row: int) -> None:
        self.missed[row] = None
        self.active_rows.discard(row)
        if self.fallback is not None:
            self.fallback.session.end(row)

    def _wake(self, cycle_input: CycleInput) -> None:
        """Let the session read the tokens that it missed in every row that it drafts for, or has drafted for."""
        for row in range(self.rows):
            active = row in cycle_input.active_rows
            if active or self.has_drafted[row]:
                self._replay_missed(row)
            self.has_drafted[row] |= active

    def _replay_missed(self, row: int) -> None:
        """Let the session read the stored tokens of the row."""
        missed, self.missed[row] = self.missed[row], None
        if missed is not None:
            parts = [*missed.prompt, *(accepted.without_padding(row) for accepted in missed.cycles)]
            tokens_T, features_TF = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            self.session.prefill(row, tokens_T, features_TF, missed.first)


class _FallbackSession:
    """The session of a method that drafts from the text alone. It reads the new text of each row
    just before it drafts."""

    def __init__(self, drafter: Drafter, rows: int) -> None:
        self.drafter, self.session = drafter, drafter.open(rows)
        self.read_tokens = [0] * rows  # how many tokens of each row's text the session has read
        self.new_rows = set(range(rows))  # rows that have a new request since the session last drafted

    def begin(self, row: int, cached_tokens: int) -> None:
        self.read_tokens[row] = min(self.read_tokens[row], cached_tokens)
        self.new_rows.add(row)

    def draft(self, cycle_input: CycleInput) -> Draft:
        for row in cycle_input.active_rows:
            text, read = cycle_input.row_tokens[row], self.read_tokens[row]
            if row in self.new_rows:
                read = self.session.truncate(row, read) if read else 0
                self.session.begin(row, read, len(text) - 1)
                self.new_rows.remove(row)
            if read < len(text) - 1:
                tokens_T = torch.tensor(text[read:-1])
                self.session.prefill(row, tokens_T, torch.empty(len(tokens_T), 0, dtype=torch.float32), read)
            self.read_tokens[row] = len(text)  # the session reads the root from `cycle_input`
        return self.session.draft(cycle_input)


def _accepted(draft: Draft, verdict: Verdict, output: TargetOutput) -> _Accepted:
    nodes = draft.tree.nodes
    if nodes == 1:
        return _Accepted(draft.tokens_BN, output.features_BNF, None)
    path_BP = verdict.path_BP[:, :nodes]  # no path is longer than its tree
    return _Accepted(verdict.tokens_BP[:, :nodes], output.features_at(path_BP), path_BP >= 0)


def _without_drafts(draft: Draft, rows: frozenset[int]) -> Draft:
    """Return the draft in which all nodes of these rows but the root are padding."""
    tree, acceptable_BN = draft.tree, draft.tree.acceptable_BN.clone()
    acceptable_BN[sorted(rows), 1:] = False
    counts = tuple(1 if row in rows else count for row, count in enumerate(tree.counts or (tree.nodes,) * tree.rows))
    return replace(draft, tree=replace(tree, acceptable_BN=acceptable_BN, counts=counts))


def _rows_without_drafts(draft: Draft, rows: Sequence[int]) -> frozenset[int]:
    """Return those rows whose trees have no node but the root."""
    return frozenset(
        row for row in rows if draft.tree.nodes == 1 or (draft.tree.counts and draft.tree.counts[row] == 1)
    )
