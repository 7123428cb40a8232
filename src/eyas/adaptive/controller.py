"""The controller of `--tree auto`: before each cycle it decides whether the method drafts, with
which tree, or what else drafts.

A bandit (bandit.py) chooses between two or three arms, by tokens a second:

    plain       no draft: one token a cycle and row; the baseline
    fallback    another method that drafts from the text alone, where the method has a draft model
    draft       the method. If it has dynamic trees, the size is the one with the highest expected goodput (goodput.py),
                given the seconds of cycles on this machine (cost.py). So sizes need not be tried one by one: the bandit
                learns one yield, that of the current size, and begins with the expected one

While the method drafts, the size is planned again at growing intervals. Now and then a larger tree
is drafted, because nothing else shows what more levels and children would yield; this takes at most
the share MAX_EXPLORE_SHARE of the time.

Each range of numbers of rows (1, 2-3, 4-7, ...) has its own bandit and tree size, as all rows share
every forward. The estimates are kept from one request to the next. Decisions depend on past cycles
only, so sampled children keep the target's distribution (tests/adaptive/test_shape_rules.py). Where
a row samples its children, the tokens that a seed gives depend on the trees and would depend on the
clock: there the method drafts with its own options.

Letters: S sizes of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eyas.adaptive import cost
from eyas.adaptive.bandit import Arm, Bandit
from eyas.adaptive.cost import Costs
from eyas.adaptive.goodput import Acceptance, Array, Plan, best
from eyas.core.dormant import Decision
from eyas.core.drafter import CycleInput, Drafter, TreeSize, build_options, method_name
from eyas.core.requests import Step
from eyas.core.target import Target
from eyas.drafters import find

__all__ = ["AdaptiveController", "make_controller"]

PLAIN, FALLBACK, DRAFT, EXPLORE, SAMPLED = "plain", "fallback", "draft", "explore", "sampled children"
TEXT_DRIFT = 2e-4  # tokens squared a cycle: how fast the yield of drafts changes with the text
MACHINE_DRIFT = 1e-4  # likewise for plain decoding, whose yield is 1: how fast its speed relative to drafting changes
PRIOR_TOKENS = 2.0  # assumed tokens per cycle, for methods without dynamic trees
PLAN_VARIANCE = 0.1  # tokens squared; variance of the yield that a plan predicts
MAX_EXPLORE_SHARE = 0.01  # the share of the time that larger trees may take beyond that of the planned ones
CYCLES_BEFORE_EXPLORING = 8  # drafted cycles before the first larger tree
MIN_PLAN_GAIN = 1.01  # the expected rate of a new tree over that of the current one, from which on it replaces it
LEARN_EVERY, PLAN_EVERY = 32, 64  # drafted cycles, at most, between two trees that are learnt from, and two plans
EMITTED_MEMORY = 2048.0  # decoded tokens over which prompts and answers are averaged
# decoded tokens that are assumed before the first one, so that the first prompt does not count alone
PRIOR_EMITTED_TOKENS = 512.0
MIN_TIMED_TOKENS = 8  # shortest prompt that is timed; shorter ones take long per token
PROMPT_TIME_WEIGHT = 0.2  # weight of the newest prompt's time in the moving average
FALLBACK_METHOD = "suffix"
FALLBACK_OPTIONS_CPU = {"suffix.nodes": 4}  # nodes cost time there, so a trial must not take many


@dataclass
class BatchState:
    """The bandit for one range of numbers of rows (1, 2 to 3, 4 to 7, ...), and the tree of its drafts."""

    bandit: Bandit
    size: TreeSize | None = None  # None: the method has no dynamic trees
    drafted: int = 0  # cycles since the method drafts again
    explore_debt: float = 0.0  # extra time of larger trees, in cycles; positive: no larger tree yet

    @property
    def learn_interval(self) -> int:
        """Drafted cycles between two trees that are learnt from: all at first, fewer later."""
        return min(LEARN_EVERY, max(1, self.drafted // 16))

    @property
    def plan_interval(self) -> int:
        return min(PLAN_EVERY, max(16, 2 * self.learn_interval))


class PromptReading:
    """Seconds that a method needs to read prompts, for each token that is decoded. Only drafting
    needs them.

    Where answers are short and many rows run, this is a large part of what drafts cost, and no
    cycle shows it.
    """

    def __init__(self) -> None:
        self._prompt_tokens, self._emitted = 0.0, PRIOR_EMITTED_TOKENS  # decaying sums
        self._seconds_per_prompt_token = 0.0  # moving average; 0: nothing was read yet

    def add_prompt(self, tokens: int, seconds: float | None) -> None:
        """Count a prompt.

        Args:
            tokens: length of the prompt, or of a chunk of it.
            seconds: time that it took to read them; None: they were not read.
        """
        self._prompt_tokens += tokens
        if seconds is not None and tokens >= MIN_TIMED_TOKENS:
            each, before = seconds / tokens, self._seconds_per_prompt_token
            self._seconds_per_prompt_token = before + PROMPT_TIME_WEIGHT * (each - before) if before else each

    def add_emitted(self, tokens: float) -> None:
        """Count tokens that were decoded."""
        keep = max(0.0, 1 - tokens / EMITTED_MEMORY)
        self._prompt_tokens *= keep
        self._emitted = self._emitted * keep + tokens

    @property
    def seconds_per_token(self) -> float:
        """Seconds of reading prompts for each decoded token."""
        return self._prompt_tokens / self._emitted * self._seconds_per_prompt_token


class AdaptiveController:
    """Decides about every cycle, and learns from its Steps.

    Args:
        max_tree: the largest tree that may be grown; None: the method has no dynamic trees.
        costs: measures or reads the costs of cycles; called once, before the first plan.
        samples_children: whether the method samples the children of sampled rows.
        fallback: drafts while the method does not; None: nothing does.
    """

    def __init__(
        self,
        max_tree: TreeSize | None = None,
        costs: Callable[[], Costs] | None = None,
        samples_children: bool = False,
        fallback: Drafter | None = None,
    ) -> None:
        self.max_tree = max_tree
        self.samples_children = samples_children
        self.fallback = fallback
        self.acceptance = None if max_tree is None or costs is None else Acceptance(max_tree)
        self._load_costs = costs
        self._costs: Costs | None = None
        self._seconds: dict[int, Array] = {}
        self._states: dict[int, BatchState] = {}
        self._limits: tuple[int | None, ...] = ()  # `CycleInput.draft_limits` of the current cycle
        self._prompts = PromptReading()

    def decide(self, cycle_input: CycleInput) -> Decision:
        """The decision about the cycle that begins with this input."""
        rows, self._limits = cycle_input.active_rows, cycle_input.draft_limits
        if self.samples_children and any(not cycle_input.sampling[b].greedy for b in rows):
            return Decision(arm=SAMPLED)
        state = self._batch_state(len(rows))
        arm = state.bandit.playing
        if arm == PLAIN:
            return Decision(plain=frozenset(rows), arm=PLAIN)
        if arm == FALLBACK:
            return Decision(fallback=self.fallback, arm=FALLBACK)
        if state.size is not None and state.drafted >= CYCLES_BEFORE_EXPLORING and state.explore_debt <= 0:
            return Decision(self._next_larger(state.size), arm=EXPLORE)
        return Decision(state.size, arm=DRAFT)

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from one cycle: its Steps, one of each active row."""
        step, rows = steps[-1], len(steps)
        decision = _decision(step)
        if decision.arm == SAMPLED:
            return
        state = self._batch_state(rows)
        tokens = sum(len(s.path) for s in steps) / rows  # a path's length is accepted + root = accepted + bonus
        self._prompts.add_emitted(tokens * rows)
        nodes = 1 if step.draft is None else step.draft.tree.nodes
        if decision.arm == EXPLORE:
            self._after_exploring(state, step, rows)
        else:
            kind = decision.arm, decision.tree_size, 1 if decision.plain else nodes
            state.bandit.observe(decision.arm, kind, tokens, step.seconds)
        if decision.drafts_every_row:
            self._after_drafting(state, step, rows)
        if state.bandit.may_choose:
            self._choose(state, rows)

    def observe_prompt(self, tokens: int, seconds: float | None) -> None:
        """Learn from a prompt that is read for drafts, or would be."""
        self._prompts.add_prompt(tokens, seconds)

    def is_dormant(self, rows: int) -> bool:
        """Whether the method is expected not to draft the next cycle of `rows` rows: then the
        prompt of a new row may be stored."""
        state = self._states.get(rows.bit_length())
        return state is not None and state.bandit.playing != DRAFT

    def _choose(self, state: BatchState, rows: int) -> None:
        before = state.bandit.playing
        drafting = state.bandit.arms[DRAFT]
        drafting.other_seconds = self._prompts.seconds_per_token * drafting.mean * rows
        state.bandit.choose()
        if state.bandit.playing == DRAFT != before:
            state.drafted, state.explore_debt = 0, 0.0
            self._replan(state, rows)

    def _after_drafting(self, state: BatchState, step: Step, rows: int) -> None:
        state.drafted += 1
        explored = _decision(step).arm == EXPLORE
        if explored or state.drafted % state.learn_interval == 0:
            self._learn_tree(step)
        if not explored:
            state.explore_debt -= MAX_EXPLORE_SHARE
            if state.drafted % state.plan_interval == 0 or state.drafted == CYCLES_BEFORE_EXPLORING // 2:
                self._replan(state, rows)

    def _after_exploring(self, state: BatchState, step: Step, rows: int) -> None:
        """The bandit does not learn from the cycle of a larger tree, because that says nothing
        about the yield of the current one. The extra time of the cycle becomes `explore_debt`."""
        assert state.size is not None
        size = _decision(step).tree_size
        assert size is not None
        larger = self._expected(size, rows).seconds
        state.explore_debt = max(larger / self._expected(state.size, rows).seconds - 1, 2 * MAX_EXPLORE_SHARE)

    def _learn_tree(self, step: Step) -> None:
        """Let `Acceptance` learn from one row's tree, after the cycle's one transfer to the host,
        so that nothing waits for it."""
        draft, size = step.draft, _decision(step).tree_size
        if self.acceptance is None or size is None or draft is None or draft.value_BN is None:
            return
        if self._limits and self._limits[step.row] is not None:  # some of its nodes could not be accepted
            return
        row, full = step.row, draft.drafted
        tree = draft.tree.parents_BN[row].tolist(), draft.value_BN[row].tolist()
        everything = None if full is None else (full.parents_BX[row].tolist(), full.value_BX[row].tolist())
        self.acceptance.learn(*tree, size, len(step.path) - 1, everything)

    # --- the planned tree -------------------------------------------------------------------------------------------

    def _batch_state(self, rows: int) -> BatchState:
        key = rows.bit_length()
        if key not in self._states:
            self._states[key] = state = BatchState(Bandit(self._arms(rows)))
            if self.acceptance is not None:
                plan = self._plan(rows)
                state.size = plan.size
                state.bandit.arms[DRAFT].replace(1 + plan.accepted, 1.0, plan.seconds)
        return self._states[key]

    def _arms(self, rows: int) -> dict[str, Arm]:
        """A new bandit's arms: a plain cycle always yields one token; drafts start from a prior."""
        arms = {PLAIN: Arm(mean=1.0, variance=0.0, noise=1e-9, drift=MACHINE_DRIFT)}
        arms[DRAFT] = Arm(mean=PRIOR_TOKENS, variance=1.0, noise=1 / rows, drift=TEXT_DRIFT)
        if self.fallback is not None:
            arms[FALLBACK] = Arm(mean=1.0, variance=1.0, noise=1 / rows, drift=TEXT_DRIFT, block=2)
        return arms

    def _replan(self, state: BatchState, rows: int) -> None:
        """Switch to another tree if it promises clearly more; the arm then begins with the expected
        yield of that tree."""
        if state.size is None:
            return
        arm, current, plan = state.bandit.arms[DRAFT], self._expected(state.size, rows), self._plan(rows)
        if plan.size == state.size or plan.rate <= MIN_PLAN_GAIN * current.rate:
            return
        # The costs are right in proportion; measured cycles of the current tree give the scale.
        measured = arm.seconds(state.bandit.medians) if arm.kinds else None
        scale = 1.0 if measured is None else measured / current.seconds
        state.size = plan.size
        arm.replace(1 + plan.accepted, max(arm.variance, PLAN_VARIANCE), scale * plan.seconds)

    def _seconds_by_size(self, rows: int) -> Array:
        """[S]: seconds of a cycle with each size, by the costs."""
        assert self.acceptance is not None
        assert self._load_costs is not None
        if self._costs is None:
            self._costs = self._load_costs()
        if rows not in self._seconds:
            self._seconds[rows] = np.array([self._costs.cycle(size, rows) for size in self.acceptance.all_sizes])
        return self._seconds[rows]

    def _plan(self, rows: int) -> Plan:
        """The size with the most tokens a second."""
        assert self.acceptance is not None
        return best(self.acceptance.all_sizes, self.acceptance.accepted_S, self._seconds_by_size(rows))

    def _expected(self, size: TreeSize, rows: int) -> Plan:
        assert self.acceptance is not None
        seconds = float(self._seconds_by_size(rows)[self.acceptance.place[size]])
        return Plan(size, self.acceptance(size), seconds)

    def _next_larger(self, size: TreeSize) -> TreeSize:
        """The next larger size to explore."""
        assert self.acceptance is not None
        assert self.max_tree is not None
        wanted = TreeSize(size.nodes + 4, size.depth + 2, size.branch + 2).within(self.max_tree)
        smaller = [s for s in self.acceptance.all_sizes if s.within(wanted) == s]
        return max(smaller, key=lambda s: (s.nodes, s.depth, s.branch))


def _decision(step: Step) -> Decision:
    assert isinstance(step.decision, Decision)
    return step.decision


def make_controller(drafter: Drafter, fallback: bool = True, compared: bool = False) -> AdaptiveController | None:
    """The controller of a method; None for plain decoding, where there is nothing to decide.

    Args:
        fallback: whether another method may draft where this one does not pay. A method without a
            model has no fallback.
        compared: the method runs against others, so costs that were measured on a busy machine are
            measured again.
    """
    if method_name(drafter) == "vanilla":
        return None
    doubtful_seconds = 0.0 if compared else cost.DOUBTFUL_SECONDS
    costs = (
        None if drafter.max_tree is None else (lambda: cost.load_costs(drafter, doubtful_seconds=doubtful_seconds)[0])
    )
    other = None if drafter.model_free or not fallback else _load_fallback(drafter.target)
    return AdaptiveController(drafter.max_tree, costs, drafter.samples_children, other)


def _load_fallback(target: Target) -> Drafter:
    kind = find(FALLBACK_METHOD)
    options = FALLBACK_OPTIONS_CPU if target.device.type == "cpu" else {}
    return kind.load(None, target, build_options(kind.Options, options))
