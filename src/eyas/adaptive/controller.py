"""The controller of `--tree auto`: before each cycle it decides which method drafts, if any, and how much.
docs/design/controller.md describes it.

    base     plain decoding; where the method has a draft model, with guesses from the text (`fallback`)
    draft    the method; in a cycle in which guesses from the text promise more tokens a second than the method has
             made so far, these guesses. Of dynamic trees it has the size with the highest expected goodput

How many guesses from the text are verified is chosen in every cycle, for all rows together (nodes.py). A bandit (bandit.py)
chooses between the two arms, by tokens a second. While a method drafts, its size is planned again at growing
intervals (goodput.py, cost.py). Now and then a larger tree is drafted, because nothing else shows its yield.

Each range of numbers of rows (1, 2-3, 4-7, ...) has its own bandit and tree size, as all rows share
every forward. The estimates are kept from one request to the next. Decisions about methods that
may sample children depend on past cycles only, so these keep the target's distribution
(tests/adaptive/test_shape_rules.py). Where a row samples its children, the tokens that a seed gives
depend on the trees and would depend on the clock: there the method drafts with its own options.

Letters: S sizes of trees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from eyas.adaptive import cost
from eyas.adaptive.bandit import MIN_NOISE, Arm, Bandit
from eyas.adaptive.cost import Costs
from eyas.adaptive.goodput import PRIOR_CHANCE, Acceptance, Array, Plan, best
from eyas.adaptive.memory import AcceptanceCheck, Memory, Remembered, first_chance, trained_chance
from eyas.adaptive.nodes import NodeChoice, PassSeconds
from eyas.core.dormant import Decision
from eyas.core.drafter import CycleInput, Drafter, TreeSize, method_name
from eyas.core.requests import Step
from eyas.drafters import find
from eyas.targets.placement import is_tensor_parallel

__all__ = ["AdaptiveController", "make_controller"]

log = logging.getLogger(__name__)  # the command line shows its messages

BASE, DRAFT, EXPLORE, SAMPLED = "base", "draft", "explore", "sampled children"
TEXT_DRIFT = 2e-4  # tokens squared a cycle: how fast the yield of drafts changes with the text
PRIOR_TOKENS = 2.0  # assumed tokens per cycle, for methods without dynamic trees
PLAN_VARIANCE = 0.1  # tokens squared; variance of the yield that a plan predicts
# the accepted tokens that are assumed of a head that never drafted, over those that its plan expects
PRIOR_TRUST = 0.85
# tokens squared: how much the yield of the same drafts differs between the texts of processes
REMEMBERED_VARIANCE = 0.2
MAX_EXPLORE_SHARE = 0.01  # the share of the time that larger trees may take beyond that of the planned ones
CYCLES_BEFORE_EXPLORING = 8  # drafted cycles before the first larger tree
MIN_PLAN_GAIN = 1.01  # the expected rate of a new tree over that of the current one, from which on it replaces it
LEARN_EVERY, PLAN_EVERY = 32, 64  # drafted cycles, at most, between two trees that are learnt from, and two plans
EMITTED_MEMORY = 2048.0  # decoded tokens over which prompts and answers are averaged
# decoded tokens that are assumed before the first one, so that the first prompt does not count alone
PRIOR_EMITTED_TOKENS = 512.0
MIN_TIMED_TOKENS = 8  # shortest prompt that is timed; shorter ones take long per token
PROMPT_TIME_WEIGHT = 0.2  # weight of the newest prompt's time in the moving average


@dataclass
class BatchState:
    """The bandit for one range of numbers of rows (1, 2 to 3, 4 to 7, ...), and the tree of its drafts."""

    bandit: Bandit
    method: Arm  # estimates the cycles that the method itself drafts; the bandit does not choose it
    size: TreeSize | None = None  # None: the method has no dynamic trees
    drafted: int = 0  # cycles since the method drafts again
    explore_debt: float = 0.0  # extra time of larger trees, in cycles; positive: no larger tree yet

    @property
    def learn_interval(self) -> int:
        """Drafted cycles between two trees that are learnt from: all at first, fewer later."""
        return min(LEARN_EVERY, max(1, self.drafted // 16))

    @property
    def method_rate(self) -> float:
        """Tokens a second and row in the method's own cycles."""
        return self.method.mean / (self.method.seconds(self.bandit.medians) or math.inf)

    @property
    def plan_interval(self) -> int:
        """Return the number of cycles until the next plan."""
        return min(PLAN_EVERY, max(16, 2 * self.learn_interval))


class PromptReading:
    """Seconds that a method needs to read prompts, for each token that is decoded. Only drafting
    needs them.

    Where answers are short and many rows run, this is a large part of the cost of drafts, and no cycle shows it.
    """

    def __init__(self) -> None:
        self._prompt_tokens, self._emitted = 0.0, PRIOR_EMITTED_TOKENS  # decaying sums
        self._seconds_per_prompt_token = 0.0  # moving average; 0: nothing was read yet

    def add_prompt(self, tokens: int, seconds: float | None) -> None:
        """Count a prompt.

        Args:
            tokens: length of the prompt, or of a chunk of it.
            seconds: time that it took to read them; None if they were not read.
        """
        self._prompt_tokens += tokens
        if seconds is not None and tokens >= MIN_TIMED_TOKENS:
            each, before = seconds / tokens, self._seconds_per_prompt_token
            self._seconds_per_prompt_token = before + PROMPT_TIME_WEIGHT * (each - before) if before else each

    def add_emitted(self, tokens: float) -> None:
        """Note emitted tokens; the weight of earlier ones and of the prompt decays."""
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
        costs: measures or reads the costs of cycles; called once, before the first decision.
        max_tree: the largest tree that may be grown; None: the method has no dynamic trees.
        samples_children: whether the method samples the children of sampled rows.
        chooses_nodes: whether the method drafts from the text alone, as `Drafter.chooses_nodes`.
        fallback: a method that `chooses_nodes`, which drafts while this one does not; None: nothing does.
        skips_padding: as `Runner.skips_padding`.
        chance: the share of first draft tokens that is assumed to be accepted, until trees have been drafted.
        memory: keeps the learned figures for the next process; None: they are not kept.
        trained: the share of first draft tokens that were accepted in the head's training; a head that accepts much
            fewer gets a warning. None: it is not known.
    """

    def __init__(
        self,
        costs: Callable[[], Costs],
        max_tree: TreeSize | None = None,
        samples_children: bool = False,
        chooses_nodes: bool = False,
        fallback: Drafter | None = None,
        skips_padding: bool = True,
        chance: float = PRIOR_CHANCE,
        memory: Memory | None = None,
        trained: float | None = None,
    ) -> None:
        self.max_tree = max_tree
        self.samples_children = samples_children
        self.chooses_nodes = chooses_nodes
        self.fallback = fallback
        self.skips_padding = skips_padding
        self.acceptance = None if max_tree is None else Acceptance(max_tree, chance)
        self._load_costs = costs
        self._seconds: dict[int, Array] = {}
        self._states: dict[int, BatchState] = {}
        self._limits: tuple[int | None, ...] = ()  # `CycleInput.draft_limits` of the current cycle
        self._prompts = PromptReading()
        self._memory = memory
        self._check = AcceptanceCheck(trained)
        self._is_greedy = False  # whether all rows of the current cycle are

    @cached_property
    def _remembered(self) -> Remembered:
        """The knowledge of an earlier process; read once, before the first plan."""
        found = None if self._memory is None else self._memory.read()
        if found is None:
            return Remembered()
        if self.acceptance is not None and not self.acceptance.begin_with(found.trees):
            return Remembered()
        return found

    @cached_property
    def _costs(self) -> Costs:
        return self._load_costs()

    @cached_property
    def _passes(self) -> PassSeconds:
        return PassSeconds(self._costs.nodes, self._costs.verify)

    def decide(self, cycle_input: CycleInput) -> Decision:
        """Return the decision about the cycle that begins with this input."""
        rows, self._limits = cycle_input.active_rows, cycle_input.draft_limits
        self._is_greedy = cycle_input.adjustments is None and all(cycle_input.sampling[b].greedy for b in rows)
        if self.samples_children and any(not cycle_input.sampling[b].greedy for b in rows):
            return Decision(arm=SAMPLED)
        if self.chooses_nodes:
            return Decision(arm=BASE, chooser=self._chooser(cycle_input))
        state = self._batch_state(len(rows))
        if state.bandit.playing == DRAFT:
            if state.size is not None and state.drafted >= CYCLES_BEFORE_EXPLORING and state.explore_debt <= 0:
                return Decision(self._next_larger(state.size), arm=EXPLORE)
            drafted = Decision(state.size, arm=DRAFT)
            if self.fallback is None:
                return drafted
            chooser = self._chooser(cycle_input, len(rows) * state.method_rate)
            return Decision(fallback=self.fallback, arm=DRAFT, chooser=chooser, otherwise=drafted)
        if self.fallback is None:
            return Decision(plain=frozenset(rows), arm=BASE)
        return Decision(fallback=self.fallback, arm=BASE, chooser=self._chooser(cycle_input))

    def _chooser(self, cycle_input: CycleInput, rival: float = 0.0) -> NodeChoice:
        rows, sampling = cycle_input.active_rows, cycle_input.sampling
        # scores that are not the logits themselves are computed for padding too
        is_padded = cycle_input.adjustments is not None or any(not sampling[b].greedy for b in rows)
        return self._passes.choice(len(rows), is_padded or not self.skips_padding, rival)

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn from one cycle: its Steps, one of each active row."""
        step, rows = steps[-1], len(steps)
        decision = _decision(step)
        if decision.arm == SAMPLED:
            return
        if decision.chooser is not None or decision.arm == BASE:
            padded = decision.chooser is not None and decision.chooser.padded
            self._passes.observe(_nodes(steps, padded), step.seconds)
        if self.chooses_nodes:
            return
        state = self._batch_state(rows)
        tokens = sum(len(s.path) for s in steps) / rows  # a path's length is accepted + root = accepted + bonus
        self._prompts.add_emitted(tokens * rows)
        if decision.arm != EXPLORE:  # a larger tree says nothing about the yield of the current one
            kind = decision.arm, decision.tree_size, _nodes(steps).bit_length()
            state.method.drift_on()
            if decision.arm == DRAFT and decision.chooser is None and kind in state.bandit.medians:
                state.method.update(tokens, kind)
            state.bandit.observe(decision.arm, kind, tokens, step.seconds)
        if decision.arm != BASE and self._is_greedy:
            self._check.observe([s for s in steps if not self._limits or self._limits[s.row] != 0])
        if decision.arm != BASE and decision.chooser is None:
            self._after_drafting(state, step, rows)
        if state.bandit.may_choose:
            self._choose(state, rows)
        if self._memory is not None and self._memory.is_due():
            self._memory.keep(self._learnt())

    def _learnt(self) -> Remembered:
        trees = () if self.acceptance is None else self.acceptance.sums
        drafted = {key: state.method.mean for key, state in self._states.items() if state.method.kinds}
        return Remembered(trees, tuple((dict(self._remembered.tokens) | drafted).items()))

    def observe_prompt(self, tokens: int, seconds: float | None) -> None:
        """Learn from a prompt that is read for drafts, or would be."""
        self._prompts.add_prompt(tokens, seconds)

    def is_dormant(self, rows: int) -> bool:
        """Return whether the method is expected not to draft the next cycle of `rows` rows: then the
        prompt of a new row may be stored."""
        state = self._states.get(rows.bit_length())
        return state is not None and state.bandit.playing != DRAFT

    def _choose(self, state: BatchState, rows: int) -> None:
        before = state.bandit.playing
        drafting = state.bandit.arms[DRAFT]
        drafting.other_seconds = self._prompts.seconds_per_token * drafting.mean * rows
        if not drafting.kinds:
            drafting.prior_seconds = self._passes.pace(rows) * self._costs.cycle(state.size, rows)
            state.method.prior_seconds = drafting.prior_seconds
        state.bandit.choose()
        state.method.break_even = drafting.break_even
        if state.bandit.playing == DRAFT != before:
            state.drafted, state.explore_debt = 0, 0.0
            self._replan(state, rows)

    def _after_drafting(self, state: BatchState, step: Step, rows: int) -> None:
        state.drafted += 1
        explored = _decision(step).arm == EXPLORE
        if explored or state.drafted % state.learn_interval == 0:
            self._learn_tree(step)
        if explored:
            size = _decision(step).tree_size
            assert size is not None
            assert state.size is not None
            further = self._expected(size, rows).seconds / self._expected(state.size, rows).seconds - 1
            state.explore_debt = max(further, 2 * MAX_EXPLORE_SHARE)
            return
        state.explore_debt -= MAX_EXPLORE_SHARE
        if state.drafted % state.plan_interval == 0 or state.drafted == CYCLES_BEFORE_EXPLORING // 2:
            self._replan(state, rows)

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

    def _batch_state(self, rows: int) -> BatchState:
        key = rows.bit_length()
        if key not in self._states:
            before = dict(self._remembered.tokens).get(key)
            variance = 1.0 if before is None else REMEMBERED_VARIANCE
            drafting = Arm(before or PRIOR_TOKENS, variance, 1 / rows, TEXT_DRIFT)
            # without guesses a cycle yields one token; with them, one or more
            base = Arm(1.0, 0.0, MIN_NOISE, TEXT_DRIFT)
            if self.fallback is not None:
                base = Arm(1.0, 1.0, 1 / rows, TEXT_DRIFT)
            self._states[key] = state = BatchState(Bandit({BASE: base, DRAFT: drafting}), replace(drafting))
            if self.acceptance is not None:
                state.size, accepted, _ = self._plan(rows)
                trust = PRIOR_TRUST if before is None else 1.0
                drafting.mean = state.method.mean = 1 + trust * accepted
            drafting.prior_seconds = state.method.prior_seconds = self._costs.cycle(state.size, rows)
        return self._states[key]

    def _replan(self, state: BatchState, rows: int) -> None:
        """Switch to another tree if it promises clearly more; the arm then begins with the expected
        yield of that tree."""
        if state.size is None:
            return
        arm, method = state.bandit.arms[DRAFT], state.method
        current, plan = self._expected(state.size, rows), self._plan(rows)
        if plan.size == state.size or plan.rate <= MIN_PLAN_GAIN * current.rate:
            return
        # The costs are right in proportion; measured cycles of the current tree give the scale.
        medians = state.bandit.medians
        measured = (method.kinds and method.seconds(medians)) or current.seconds
        mean, seconds = 1 + plan.accepted, measured / current.seconds * plan.seconds
        # guesses from the text add as much as they did with the tree before
        text_tokens = arm.mean - method.mean
        text_seconds = ((arm.kinds and arm.seconds(medians)) or measured) - measured
        state.size = plan.size
        arm.replace(mean + text_tokens, max(arm.variance, PLAN_VARIANCE), seconds + text_seconds)
        method.replace(mean, max(method.variance, PLAN_VARIANCE), seconds)

    def _seconds_by_size(self, rows: int) -> Array:
        """Return the seconds [S] of a cycle with each size, by the costs."""
        assert self.acceptance is not None
        if rows not in self._seconds:
            self._seconds[rows] = np.array([self._costs.cycle(size, rows) for size in self.acceptance.all_sizes])
        return self._seconds[rows]

    def _plan(self, rows: int) -> Plan:
        assert self.acceptance is not None
        return best(self.acceptance.all_sizes, self.acceptance.accepted_S, self._seconds_by_size(rows))

    def _expected(self, size: TreeSize, rows: int) -> Plan:
        assert self.acceptance is not None
        seconds = float(self._seconds_by_size(rows)[self.acceptance.place[size]])
        return Plan(size, self.acceptance(size), seconds)

    def _next_larger(self, size: TreeSize) -> TreeSize:
        assert self.acceptance is not None
        assert self.max_tree is not None
        wanted = TreeSize(size.nodes + 4, size.depth + 2, size.branch + 2).within(self.max_tree)
        smaller = [s for s in self.acceptance.all_sizes if s.within(wanted) == s]
        return max(smaller, key=lambda s: (s.nodes, s.depth, s.branch))


def _decision(step: Step) -> Decision:
    assert isinstance(step.decision, Decision)
    return step.decision


def _nodes(steps: Sequence[Step], padded: bool = False) -> int:
    """Return the nodes of a cycle's pass, of all of its rows together. `padded`: padding takes its time too."""
    if (draft := steps[0].draft) is None:
        return len(steps)
    if padded or not draft.tree.counts:
        return draft.tree.nodes * len(steps)
    return sum(draft.tree.counts[step.row] for step in steps)


def make_controller(drafter: Drafter, fallback: bool = True, compared: bool = False) -> AdaptiveController | None:
    """Return the controller of a method; None for plain decoding, where there is nothing to decide, and where the
    processes of a target would decide differently.

    Args:
        fallback: whether another method may draft where this one does not pay. A method without a
            model has no fallback.
        compared: the method runs against others, so costs that were measured on a busy machine are
            measured again, and nothing is known from earlier runs.
    """
    if method_name(drafter) == "vanilla":
        return None
    target = drafter.target
    if is_tensor_parallel(target.model):
        log.info("tree auto is fixed here: it decides by the clock, and the clocks of the target's processes differ")
        return None
    doubtful_seconds = 0.0 if compared else cost.DOUBTFUL_SECONDS
    other = None if drafter.model_free or not fallback else find("suffix").load(None, target)
    return AdaptiveController(
        lambda: cost.load_costs(drafter, doubtful_seconds=doubtful_seconds)[0],
        drafter.max_tree,
        drafter.samples_children,
        drafter.chooses_nodes,
        other,
        target.runner.skips_padding,
        first_chance(drafter),
        None if compared else Memory.of(drafter),
        trained_chance(drafter),
    )
