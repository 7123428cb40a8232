"""The policy: the tree that pays most, another drafter or plain decoding where none does. Never slower, but for what finding out costs.

    drafting   a tree by `plan`, looked at again now and then; rarely a larger one, to see what it would yield ("explore"),
               and a few plain cycles, to see what they take ("measure")
    losing     tokens a second of the last cycles, even with luck, are less than they would be without the head: first a smaller tree, if
               one is said to pay; else the head sleeps
    asleep     for as long as makes what the attempt cost a fiftieth of it, each time at least twice as long, at most 2,048 cycles; then it
               is tried again. Meanwhile a spare drafts, a method of text, which costs nothing where it has no guess; once it makes fewer
               tokens a second than plain decoding, measured just before, cycles are plain, and its next attempt waits in the same way

Without the head: what plain decoding makes, measured just before; or the spare, if it made more in the last nap. A head that is better than
plain decoding, and only fell asleep because of the spare, is woken when that begins to lose.

All times are those of Steps: what a cycle took from its begin to its tokens, drafts and what a waking head reads included. A cycle counts
for what those of its kind usually take, so one that the machine held up says nothing. Each number of rows (1, 2-3, 4-7,
...) is judged for itself, its rows all alike: they share every pass. What is learnt is kept from one request to the next.

A method whose trees are as they are is drafted with or not; what grows is planned too. Where sampled rows' children are drawn, what a seed
gives depends on the trees, and would depend on the clock: such cycles are left as they are. Methods of text have no spare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from eyas.adaptive import cost
from eyas.adaptive.cost import Costs
from eyas.adaptive.goodput import Acceptance, Array, Plan, best
from eyas.core.drafter import build_options
from eyas.core.engine import Decision, Step
from eyas.core.target import Target
from eyas.drafters import CycleInput, Drafter, Shape, find
from eyas.drafters._merge import method_name

__all__ = ["AdaptiveController", "auto"]

FIRST = 3  # plain cycles at the very beginning, of which the first warms up
SURE = 4  # drafted cycles before which nothing is judged
BURST = 3  # plain cycles that measure
MEASURE, LONGEST_MEASURE = 32, 512  # drafted cycles between two measurements: at first, at most
EXPLORE, LONGEST_EXPLORE = 8, 256  # drafted cycles between two larger trees: at first, and half as many more each time, at most
LATER = 128  # drafted cycles from which on less is looked at
REPLAN, REPLAN_LATER = 16, 64  # drafted cycles between two plans
CLOSELY, LOOK, LOOK_LATER = 24, 4, 32  # drafted cycles, at first, of which every tree is learnt from; then between two such cycles
JUDGE, SOON = 4, 16  # drafted cycles between two judgements; before `SOON` every one is judged
CHANGE = 1.01  # a plan that promises less is not worth a change
GAIN = 1.03  # what a smaller tree, or the spare, must promise over going without
SMALLER = 2  # smaller trees that are tried before the head sleeps
PRICE = 0.02  # of the plain cycles that follow, what an attempt may cost
NAP, LONGEST_NAP = 64, 2048  # cycles
RECOVERED = 128  # drafted cycles after which earlier attempts are forgotten
SPARE = "suffix"  # the method that drafts while the head sleeps
SMALL = {"suffix.nodes": 4}  # on a CPU
MEMORY = 48  # cycles that a yield remembers
LUCK = 1.5  # standard errors
PLAIN, PLAIN_MEMORY = "plain", 5  # a measurement is more than half of what is remembered
FRESH = 8  # drafted cycles after which plain decoding is measured again before it is said to be faster


class RunningMedian:
    """What a cycle of each kind usually takes: the lower median of the last ones."""

    def __init__(self) -> None:
        self._seconds: dict[object, deque[float]] = {}

    def add(self, kind: object, seconds: float, memory: int = 9) -> None:
        self._seconds.setdefault(kind, deque(maxlen=memory)).append(seconds)

    def __getitem__(self, kind: object) -> float:
        return median_low(self._seconds[kind])

    def __contains__(self, kind: object) -> bool:
        return kind in self._seconds


@dataclass
class DecayedStats:
    """Tokens of cycles, and how many there were of each kind; older ones fade."""

    count: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0  # of tokens
    kinds: dict[object, float] = field(default_factory=dict)

    def add(self, tokens: int, kind: object) -> None:
        fade = 1 - 1 / MEMORY
        self.count = fade * self.count + 1
        self.tokens = fade * self.tokens + tokens
        self.squares = fade * self.squares + tokens * tokens
        for known in self.kinds:
            self.kinds[known] *= fade
        self.kinds[kind] = self.kinds.get(kind, 0.0) + 1

    @property
    def mean(self) -> float:
        """Tokens of a cycle."""
        return self.tokens / self.count

    def seconds(self, usual: RunningMedian) -> float:
        """Of a cycle."""
        return sum(count * usual[kind] for kind, count in self.kinds.items()) / self.count

    def with_luck(self, rows: int) -> float:
        """Tokens of a cycle: their mean and what chance may have taken from it, more where there were few."""
        spread = max(0.0, self.squares / self.count - self.mean * self.mean) + 1.5 * rows / self.count
        return self.mean + LUCK * (spread / self.count) ** 0.5  # type: ignore[no-any-return]


@dataclass
class FallbackState:
    """What is known of the spare's cycles."""

    drafted: DecayedStats = field(default_factory=DecayedStats)  # since this attempt began
    cycles: int = 0  # likewise
    spent: float = 0.0  # likewise; seconds in which plain decoding would have been further
    nap: int = 0  # plain cycles after the last attempt that failed
    left: int = 0  # plain cycles to come

    def begin(self) -> None:
        """What was before says nothing of the text that comes."""
        self.drafted, self.cycles, self.spent = DecayedStats(), 0, 0.0


@dataclass
class BatchState:
    """What is known of cycles with so many rows, and what goes on there."""

    shape: Shape | None  # of a grown tree
    drafted: DecayedStats = field(default_factory=DecayedStats)  # with this shape, since the head woke
    usual: RunningMedian = field(default_factory=RunningMedian)
    scale: float = 1.0  # measured over expected seconds of drafted cycles
    left: int = FIRST  # cycles without the head to come
    why: str = "measure"  # of them
    cycles: int = 0  # drafted since the head woke
    smaller: int = 0  # trees tried since the head woke
    spent: float = 0.0  # seconds since the head woke, in which the text would have been further without it
    nap: int = 0  # the last one's cycles
    fallback: FallbackState = field(default_factory=FallbackState)
    gain: float = 1.0  # tokens a second of the last nap over plain decoding's
    second: bool = False  # whether the head sleeps because of the spare alone
    measure: int = MEASURE
    measured: int = 0  # cycles since the last plain one
    explore: int = EXPLORE
    explored: int = 0

    @property
    def plain(self) -> float:
        """Seconds of a plain cycle: of a token of each row."""
        return self.usual[PLAIN]

    @property
    def rival(self) -> float:
        """Seconds of a token of each row without the head."""
        return self.plain / self.gain

    @property
    def looks(self) -> bool:
        """Whether this cycle's tree is learnt from."""
        return self.cycles <= CLOSELY or self.cycles % (LOOK if self.cycles < LATER else LOOK_LATER) == 0

    @property
    def replans(self) -> bool:
        """Whether another tree is planned after this cycle."""
        return self.cycles % (REPLAN if self.cycles < LATER else REPLAN_LATER) == 0


class AdaptiveController:
    """See above.

    Args:
        largest: the largest tree that may be grown; None: the method's trees are as they are.
        costs: asked for once, before the first plan.
        draws: whether the method draws sampled rows' children.
        spare: drafts while the head sleeps; None: nothing does.
    """

    def __init__(
        self, largest: Shape | None = None, costs: Callable[[], Costs] | None = None, draws: bool = False, fallback: Drafter | None = None
    ) -> None:
        self.largest, self.samples_children, self.fallback, self._make = largest, draws, fallback, costs
        self.acceptance = None if largest is None or costs is None else Acceptance(largest)
        self._costs: Costs | None = None
        self._seconds: dict[int, Array] = {}
        self._sides: dict[int, BatchState] = {}

    def decide(self, roots: CycleInput) -> Decision:
        rows = len(roots.active_rows)
        if self.samples_children and any(not roots.sampling[b].greedy for b in roots.active_rows):
            return Decision(why="drawn")
        side = self._side(rows)
        if side.left and side.why == "asleep" and self.fallback is not None and not side.fallback.left:
            return Decision(why=side.why, fallback=self.fallback)
        if side.left:
            return Decision(None, frozenset(roots.active_rows), side.why)
        if side.explored >= side.explore and side.shape is not None:
            return Decision(self._larger(side.shape), why="explore")
        return Decision(side.shape)

    def learn(self, steps: Sequence[Step]) -> None:
        step, rows = steps[-1], len(steps)
        decision, side = step.decision, self._side(rows)
        if decision.why == "drawn":
            return
        tokens = sum(len(s.path) for s in steps)  # the roots stand for the bonuses
        if decision.plain:
            self._plain(side, rows, step.seconds)
        elif decision.fallback is not None:
            self._spared(side, rows, tokens, step)
        else:
            self._drafted(side, rows, tokens, step)

    def is_dormant(self, rows: int) -> bool:
        side = self._sides.get(rows.bit_length())
        return side is not None and side.why == "asleep" and side.left > 0

    # --- what happened

    def _plain(self, side: BatchState, rows: int, seconds: float) -> None:
        side.usual.add(PLAIN, seconds, PLAIN_MEMORY)
        side.left -= 1
        side.measured, side.fallback.left = 0, max(0, side.fallback.left - 1)
        if not side.left and side.why == "asleep":
            self._wake(side, rows)

    def _spared(self, side: BatchState, rows: int, tokens: int, step: Step) -> None:
        fallback = side.fallback
        assert step.draft is not None
        kind = SPARE, step.draft.tree.nodes
        side.left, side.measured, fallback.cycles = side.left - 1, side.measured + 1, fallback.cycles + 1
        new = kind not in side.usual
        side.usual.add(kind, step.seconds)
        if not new:  # what is met for the first time may take long, once
            took = step.seconds if fallback.cycles == 1 else side.usual[kind]  # the first reads the text
            fallback.spent += took - tokens * side.plain / rows
            fallback.drafted.add(tokens, kind)
            self._judge_spare(side, rows)
        if not side.left:
            self._wake(side, rows)

    def _drafted(self, side: BatchState, rows: int, tokens: int, step: Step) -> None:
        side.cycles, side.measured, side.explored = side.cycles + 1, side.measured + 1, side.explored + 1
        explored = step.decision.why == "explore"
        assert step.draft is not None
        kind = step.decision.shape, step.draft.tree.nodes
        side.usual.add(kind, step.seconds)
        if explored or side.looks:
            self._look(step)
        side.spent += (step.seconds if side.cycles == 1 else side.usual[kind]) - tokens * side.rival / rows  # the first holds the waking
        if explored:
            side.explored, side.explore = 0, min(side.explore + side.explore // 2, LONGEST_EXPLORE)
        else:
            side.drafted.add(tokens, kind)
            self._judge(side, rows)

    def _look(self, step: Step) -> None:
        """Learn from the row's tree; read after the cycle's one transfer, so nothing is waited for."""
        draft = step.draft
        if self.acceptance is not None and step.decision.shape is not None and draft is not None and draft.value_BN is not None:
            tree = draft.tree.parents_BN[step.row].tolist(), draft.value_BN[step.row].tolist()
            whole = draft.drafted
            drafted = None if whole is None else (whole.parents_BX[step.row].tolist(), whole.value_BX[step.row].tolist())
            self.acceptance.learn(*tree, step.decision.shape, len(step.path) - 1, drafted)

    # --- what follows

    def _judge(self, side: BatchState, rows: int) -> None:
        if (side.cycles < SOON or side.cycles % JUDGE == 0) and self._losing(side, rows):
            if side.measured > FRESH:  # the machine may have become slower since
                side.measured = side.measure
            else:
                self._give_way(side, rows)
        elif side.replans:
            self._replan(side, rows)
        if side.cycles == RECOVERED:
            side.nap = 0
        if not side.left and side.measured >= side.measure:
            side.left, side.why = BURST, "measure"
            side.measure = min(2 * side.measure, LONGEST_MEASURE)

    def _losing(self, side: BatchState, rows: int) -> bool:
        return _behind(side.drafted, side, rows, side.rival)

    def _judge_spare(self, side: BatchState, rows: int) -> None:
        fallback = side.fallback
        losing = (fallback.cycles < SOON or fallback.cycles % JUDGE == 0) and _behind(fallback.drafted, side, rows, side.plain)
        if fallback.cycles >= SOON and not losing:  # by now luck is no excuse
            losing = GAIN * fallback.drafted.mean * side.plain < fallback.drafted.seconds(side.usual) * rows
        if losing and side.measured <= FRESH:
            fallback.nap = fallback.left = _nap(fallback.spent / side.plain, fallback.nap)
            fallback.begin()
            side.left = 0 if side.second else side.left
        elif losing or side.measured >= side.measure:
            fallback.left, side.measure = BURST, min(2 * side.measure, LONGEST_MEASURE)
        if fallback.cycles == RECOVERED:
            fallback.nap = 0

    def _give_way(self, side: BatchState, rows: int) -> None:
        """A smaller tree, if it is said to pay; else sleep."""
        if side.shape is not None and side.smaller < SMALLER:
            self._scale(side, rows)
            found = self._plan(side, rows)
            if found.shape.nodes < side.shape.nodes and found.rate * side.rival > GAIN:
                side.shape, side.drafted, side.smaller = found.shape, DecayedStats(), side.smaller + 1
                return
        side.nap = side.left = _nap(side.spent / side.plain, side.nap)
        side.why, side.measure = "asleep", FRESH  # what plain decoding takes is what the spare is held to
        side.second = not _behind(side.drafted, side, rows, side.plain)
        side.fallback.begin()

    def _wake(self, side: BatchState, rows: int) -> None:
        spared = side.fallback.drafted
        side.gain = max(1.0, spared.mean * side.plain / (spared.seconds(side.usual) * rows)) if spared.count > SURE - 1 else 1.0
        side.drafted, side.cycles, side.smaller, side.spent = DecayedStats(), 0, 0, 0.0
        side.measure, side.explore, side.explored = MEASURE, EXPLORE, 0
        if side.shape is not None:
            side.shape = self._plan(side, rows).shape

    def _replan(self, side: BatchState, rows: int) -> None:
        if side.shape is None:
            return
        self._scale(side, rows)
        found = self._plan(side, rows)
        if found.shape != side.shape and found.rate > CHANGE * self._expected(side, side.shape, rows).rate:
            side.shape, side.drafted = found.shape, DecayedStats()

    # --- trees

    def _side(self, rows: int) -> BatchState:
        key = rows.bit_length()
        if key not in self._sides:
            self._sides[key] = side = BatchState(None)
            if self.acceptance is not None:
                side.shape = self._plan(side, rows).shape
        return self._sides[key]

    def _times(self, rows: int) -> Array:
        """Seconds of a cycle with each size, by the costs."""
        assert self.acceptance is not None
        assert self._make is not None
        if self._costs is None:
            self._costs = self._make()
        if rows not in self._seconds:
            self._seconds[rows] = np.array([self._costs.cycle(shape, rows) for shape in self.acceptance.shapes])
        return self._seconds[rows]

    def _plan(self, side: BatchState, rows: int) -> Plan:
        assert self.acceptance is not None
        return best(self.acceptance.shapes, self.acceptance.accepted_S, side.scale * self._times(rows))

    def _expected(self, side: BatchState, shape: Shape, rows: int) -> Plan:
        assert self.acceptance is not None
        return Plan(shape, self.acceptance(shape), side.scale * float(self._times(rows)[self.acceptance.place[shape]]))

    def _scale(self, side: BatchState, rows: int) -> None:
        """Costs are ratios: what cycles with this shape really take says how long a second is."""
        if side.shape is not None and side.drafted.count:
            side.scale *= side.drafted.seconds(side.usual) / self._expected(side, side.shape, rows).seconds

    def _larger(self, shape: Shape) -> Shape:
        assert self.acceptance is not None
        assert self.largest is not None
        wanted = Shape(shape.nodes + 4, shape.depth + 2, shape.branch + 2).within(self.largest)
        held = [s for s in self.acceptance.shapes if s.within(wanted) == s]
        return max(held, key=lambda s: (s.nodes, s.depth, s.branch))


def _behind(drafted: DecayedStats, side: BatchState, rows: int, rival: float) -> bool:
    """Whether these cycles, even with luck, make fewer tokens a second than one of each row in `rival` seconds."""
    return drafted.count > SURE - 1 and drafted.with_luck(rows) * rival < drafted.seconds(side.usual) * rows


def _nap(spent: float, last: int) -> int:
    """Cycles until an attempt that cost `spent` plain ones is made again; `last`: as many after the one before."""
    fair = min(spent / PRICE, 8 * max(NAP, last))  # however long the machine may have held one cycle up
    return int(min(max(NAP, 2 * last, fair), LONGEST_NAP))


def auto(drafter: Drafter, fallback: bool = True) -> AdaptiveController | None:
    """The policy of a method; None for plain decoding, which has nothing to govern.

    Args:
        spare: whether another method may draft where this one does not pay. None does for a method of text.
    """
    if method_name(drafter) == "vanilla":
        return None
    costs = None if drafter.max_tree is None else (lambda: cost.remembered(drafter)[0])
    other = None if drafter.model_free or not fallback else _spare(drafter.target)
    return AdaptiveController(drafter.max_tree, costs, drafter.samples_children, other)


def _spare(target: Target) -> Drafter:
    """Few nodes where each of them costs: what stands in must not cost more to try than it may gain."""
    kind = find(SPARE)
    return kind.load(None, target, build_options(kind.Options, SMALL if target.device.type == "cpu" else {}))
