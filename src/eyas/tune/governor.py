"""The policy: the tree that pays most, and plain decoding where none does. Never slower, but for what finding out costs.

    drafting   a tree by `plan`, looked at again now and then; rarely a larger one, to see what it would yield ("explore"),
               and a few plain cycles, to see what they take ("measure")
    losing     tokens a second of the last cycles, even with luck, are less than plain decoding's, measured just before: first a smaller
               tree, if one is said to pay; else the head sleeps
    asleep     plain cycles, for as long as makes what the attempt cost a fiftieth of them, each time at least twice as long, at most 2,048;
               then it is tried again

All times are those of Steps: what a cycle took from its begin to its tokens, drafts and what a waking head reads included. A cycle counts
for what those of its kind usually take, so one that the machine held up says nothing. Each number of rows (1, 2-3, 4-7,
...) is judged for itself, its rows all alike: they share every pass. What is learnt is kept from one request to the next.

A method whose trees are as they are is drafted with or not; what grows is planned too. Where sampled rows' children are drawn, what a seed
gives depends on the trees, and would depend on the clock: such cycles are left as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from eyas.decode import Decision, Step
from eyas.drafters import Drafter, Roots, Shape
from eyas.drafters._merge import name_of
from eyas.tune import cost
from eyas.tune.cost import Costs
from eyas.tune.plan import Acceptance, Array, Plan, best

__all__ = ["Governor", "auto"]

FIRST = 3  # plain cycles at the very beginning, of which the first warms up
SURE = 3  # drafted cycles before which nothing is judged
BURST = 3  # plain cycles that measure
MEASURE, LONGEST_MEASURE = 32, 512  # drafted cycles between two measurements: at first, at most
EXPLORE, LONGEST_EXPLORE = 8, 256  # drafted cycles between two larger trees
REPLAN, LATER, REPLAN_LATER = 16, 128, 32  # drafted cycles between two plans; from `LATER` on less often; trees are learnt from as often
JUDGE, SOON = 4, 16  # drafted cycles between two judgements; before `SOON` every one is judged
GAIN = 1.03  # a plan that promises less is not worth a change
SMALLER = 2  # smaller trees that are tried before the head sleeps
PRICE = 0.02  # of the plain cycles that follow, what an attempt may cost
NAP, LONGEST_NAP = 64, 2048  # plain cycles
RECOVERED = 128  # drafted cycles after which earlier attempts are forgotten
MEMORY = 48  # cycles that a yield remembers
LUCK = 1.5  # standard errors
PLAIN, PLAIN_MEMORY = "plain", 5  # a measurement is more than half of what is remembered
FRESH = 8  # drafted cycles after which plain decoding is measured again before it is said to be faster


class Usual:
    """What a cycle of each kind usually takes: the lower median of the last ones."""

    def __init__(self) -> None:
        self._seconds: dict[object, deque[float]] = {}

    def add(self, kind: object, seconds: float, memory: int = 9) -> None:
        self._seconds.setdefault(kind, deque(maxlen=memory)).append(seconds)

    def __getitem__(self, kind: object) -> float:
        return median_low(self._seconds[kind])


@dataclass
class Yield:
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

    def seconds(self, usual: Usual) -> float:
        """Of a cycle."""
        return sum(count * usual[kind] for kind, count in self.kinds.items()) / self.count

    def with_luck(self, rows: int) -> float:
        """Tokens of a cycle: their mean and what chance may have taken from it, more where there were few."""
        mean = self.tokens / self.count
        spread = max(0.0, self.squares / self.count - mean * mean) + 1.5 * rows / self.count
        return mean + LUCK * (spread / self.count) ** 0.5  # type: ignore[no-any-return]


@dataclass
class Side:
    """What is known of cycles with so many rows, and what goes on there."""

    shape: Shape | None  # of a grown tree
    drafted: Yield = field(default_factory=Yield)  # with this shape, since the head woke
    usual: Usual = field(default_factory=Usual)
    scale: float = 1.0  # measured over expected seconds of drafted cycles
    left: int = FIRST  # plain cycles to come
    why: str = "measure"  # of them
    cycles: int = 0  # drafted since the head woke
    smaller: int = 0  # trees tried since the head woke
    spent: float = 0.0  # seconds since the head woke, in which plain decoding would have been further
    nap: int = 0  # the last one's plain cycles
    measure: int = MEASURE
    measured: int = 0  # drafted cycles since
    explore: int = EXPLORE
    explored: int = 0

    @property
    def plain(self) -> float:
        """Seconds of a plain cycle."""
        return self.usual[PLAIN]

    @property
    def replans(self) -> bool:
        """Whether this cycle's tree is learnt from, and another planned."""
        return self.cycles % (REPLAN if self.cycles < LATER else REPLAN_LATER) == 0


class Governor:
    """See above.

    Args:
        largest: the largest tree that may be grown; None: the method's trees are as they are.
        costs: asked for once, before the first plan.
        draws: whether the method draws sampled rows' children.
    """

    def __init__(self, largest: Shape | None = None, costs: Callable[[], Costs] | None = None, draws: bool = False) -> None:
        self.largest, self.draws, self._make = largest, draws, costs
        self.acceptance = None if largest is None or costs is None else Acceptance(largest)
        self._costs: Costs | None = None
        self._seconds: dict[int, Array] = {}
        self._sides: dict[int, Side] = {}

    def decide(self, roots: Roots) -> Decision:
        rows = len(roots.busy)
        if self.draws and any(not roots.sampling[b].greedy for b in roots.busy):
            return Decision(why="drawn")
        side = self._side(rows)
        if side.left:
            return Decision(None, frozenset(roots.busy), side.why)
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
        else:
            self._drafted(side, rows, tokens, step)

    # --- what happened

    def _plain(self, side: Side, rows: int, seconds: float) -> None:
        side.usual.add(PLAIN, seconds, PLAIN_MEMORY)
        side.left -= 1
        if not side.left and side.why == "asleep":
            self._wake(side, rows)

    def _drafted(self, side: Side, rows: int, tokens: int, step: Step) -> None:
        side.cycles, side.measured, side.explored = side.cycles + 1, side.measured + 1, side.explored + 1
        explored = step.decision.why == "explore"
        assert step.draft is not None
        kind = step.decision.shape, step.draft.tree.nodes
        side.usual.add(kind, step.seconds)
        if explored or side.cycles <= 2 * SURE or side.replans:
            self._look(step)
        side.spent += (step.seconds if side.cycles == 1 else side.usual[kind]) - tokens * side.plain / rows  # the first holds the waking
        if explored:
            side.explored, side.explore = 0, min(2 * side.explore, LONGEST_EXPLORE)
        else:
            side.drafted.add(tokens, kind)
            self._judge(side, rows)

    def _look(self, step: Step) -> None:
        """Learn from the row's tree; read after the cycle's one transfer, so nothing is waited for."""
        draft = step.draft
        if self.acceptance is not None and step.decision.shape is not None and draft is not None and draft.value_BN is not None:
            parents, values = draft.tree.parents_BN[step.row].tolist(), draft.value_BN[step.row].tolist()
            self.acceptance.learn(parents, values, step.decision.shape, len(step.path) - 1)

    # --- what follows

    def _judge(self, side: Side, rows: int) -> None:
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
            side.measured, side.measure = 0, min(2 * side.measure, LONGEST_MEASURE)

    def _losing(self, side: Side, rows: int) -> bool:
        drafted = side.drafted
        return drafted.count > SURE - 1 and drafted.with_luck(rows) * side.plain < drafted.seconds(side.usual) * rows

    def _give_way(self, side: Side, rows: int) -> None:
        """A smaller tree, if it is said to pay; else sleep."""
        if side.shape is not None and side.smaller < SMALLER:
            self._scale(side, rows)
            found = self._plan(side, rows)
            if found.shape.nodes < side.shape.nodes and found.rate * side.plain > GAIN:
                side.shape, side.drafted, side.smaller = found.shape, Yield(), side.smaller + 1
                return
        fair = min(side.spent / (PRICE * side.plain), 8 * max(NAP, side.nap))  # however long the machine may have held one cycle up
        side.nap = side.left = int(min(max(NAP, 2 * side.nap, fair), LONGEST_NAP))
        side.why, side.measured = "asleep", 0

    def _wake(self, side: Side, rows: int) -> None:
        side.drafted, side.cycles, side.smaller, side.spent = Yield(), 0, 0, 0.0
        side.measure, side.explore, side.explored = MEASURE, EXPLORE, 0
        if side.shape is not None:
            side.shape = self._plan(side, rows).shape

    def _replan(self, side: Side, rows: int) -> None:
        if side.shape is None:
            return
        self._scale(side, rows)
        found = self._plan(side, rows)
        if found.shape != side.shape and found.rate > GAIN * self._expected(side, side.shape, rows).rate:
            side.shape, side.drafted = found.shape, Yield()

    # --- trees

    def _side(self, rows: int) -> Side:
        key = rows.bit_length()
        if key not in self._sides:
            self._sides[key] = side = Side(None)
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

    def _plan(self, side: Side, rows: int) -> Plan:
        assert self.acceptance is not None
        return best(self.acceptance.shapes, self.acceptance.accepted_S, side.scale * self._times(rows))

    def _expected(self, side: Side, shape: Shape, rows: int) -> Plan:
        assert self.acceptance is not None
        place = self.acceptance.shapes.index(shape)
        return Plan(shape, self.acceptance(shape), side.scale * float(self._times(rows)[place]))

    def _scale(self, side: Side, rows: int) -> None:
        """Costs are ratios: what cycles with this shape really take says how long a second is."""
        if side.shape is not None and side.drafted.count:
            side.scale *= side.drafted.seconds(side.usual) / self._expected(side, side.shape, rows).seconds

    def _larger(self, shape: Shape) -> Shape:
        assert self.acceptance is not None
        assert self.largest is not None
        wanted = Shape(2 * shape.nodes, shape.depth + 2, shape.branch + 2).within(self.largest)
        held = [s for s in self.acceptance.shapes if s.within(wanted) == s]
        return max(held, key=lambda s: (s.nodes, s.depth, s.branch))


def auto(drafter: Drafter) -> Governor | None:
    """The policy of a method; None for plain decoding, which has nothing to govern."""
    if name_of(drafter) == "vanilla":
        return None
    costs = None if drafter.largest is None else (lambda: cost.remembered(drafter)[0])
    return Governor(drafter.largest, costs, drafter.draws)
