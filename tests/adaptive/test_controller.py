"""The controller on simulated machines: seconds are made up, so nothing here depends on this machine's clock."""

import itertools
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from curves import LIMIT, curve
from eyas.adaptive import AdaptiveController
from eyas.adaptive.controller import CYCLES_BEFORE_EXPLORING, MAX_EXPLORE_SHARE
from eyas.adaptive.cost import Costs
from eyas.core.dormant import Decision
from eyas.core.drafter import TreeSize
from eyas.core.sampling import Sampling
from simulated import FALLBACK, FLAT, Course, FixedPolicy, SimulatedMachine, controller, cycle_of

STEEP, MIDDLE, DEAR_DRAFT = curve(0.2, 0.1), curve(0.1, 0.05), curve(0.05, 0.4)


def useless(t: int) -> float:
    return 0.0


def half(t: int) -> float:
    return 0.55


@pytest.mark.quick("False-costs0", "True-costs2")
@pytest.mark.parametrize("costs", [FLAT, STEEP, DEAR_DRAFT])
@pytest.mark.parametrize("grows", [True, False])
def test_a_useless_head_costs_at_most_three_percent(costs: Costs, grows: bool) -> None:
    """Bug: a head that is never right slows decoding down. 3,000 cycles, the trials at the beginning included."""
    machine = SimulatedMachine(costs, skill=useless).run(controller(costs, grows=grows), 3000)
    assert machine.speedup() > 0.97
    assert machine.speedup(500) > 0.98
    assert machine.share("base") > 0.95
    assert machine.share("draft", since=500) > 0, "it is never tried again"


@pytest.mark.cover
@pytest.mark.quick("costs1-0.1")
@pytest.mark.parametrize("guesses", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("costs", [FLAT, STEEP, DEAR_DRAFT])
def test_a_useless_head_and_a_useless_fallback_cost_at_most_three_percent(costs: Costs, guesses: float) -> None:
    """Bug: the trials of two arms together cost more than those of one may."""
    machine = SimulatedMachine(costs, skill=useless, guesses=lambda t: guesses).run(controller(costs, FALLBACK), 3000)
    assert machine.speedup() > 0.97
    assert machine.share("draft") > 0


@pytest.mark.slow
def test_a_head_that_is_dear_to_wake_is_tried_less_often() -> None:
    """Bug: what a waking head reads of the text that it missed is not paid for from the budget."""
    machines = [SimulatedMachine(MIDDLE, skill=useless, waking=waking) for waking in (0.0, 0.1)]
    cheap, dear = (machine.run(controller(MIDDLE), 3000) for machine in machines)
    assert dear.speedup() > 0.96
    assert dear.share("draft", since=500) < 0.7 * cheap.share("draft", since=500)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_prompts_that_only_drafts_need_are_paid_for(rows: int) -> None:
    """Bug: short answers to long prompts, whose reading no cycle shows, so drafts seem to pay."""
    per_token = MIDDLE.plain(rows) / rows
    world = {"rows": rows, "prompts": 3.0, "waking": 0.0}
    machines = [SimulatedMachine(MIDDLE, reading=share * per_token, **world) for share in (0.0, 0.4)]
    free, dear = (machine.run(controller(MIDDLE), 3000) for machine in machines)
    assert free.share("base", since=500) < 0.2
    assert dear.share("base", since=500) > 0.9
    assert dear.speedup(500) > 0.98


@pytest.mark.cover
@pytest.mark.quick("costs0-1")
@pytest.mark.parametrize(("costs", "rows"), [(FLAT, 1), (FLAT, 3), (curve(0.1, 0.1), 1)])
def test_the_fallback_drafts_where_the_head_is_useless(costs: Costs, rows: int) -> None:
    """Bug: a repeating text is decoded plainly because the head is useless; or that is never tried again."""
    world = {"skill": useless, "guesses": lambda t: 0.6, "right": lambda t: 0.7, "rows": rows}
    machine = SimulatedMachine(costs, **world).run(controller(costs, FALLBACK), 3000)
    always = SimulatedMachine(costs, **world).run(FixedPolicy(None, FALLBACK), 1000).speedup()
    assert always > 1.2
    assert machine.speedup() > 0.95 * always
    assert sum(decision.drafts_every_row for decision in machine.decisions[500:]) >= 4, "the head is never tried again"


@pytest.mark.quick("0.2-0.97")
@pytest.mark.parametrize(("right", "gain"), [(0.95, 1.1), (0.2, 0.97)])
def test_good_guesses_come_before_a_good_head(right: float, gain: float) -> None:
    """Bug: a head that pays hides good guesses (in three cycles of ten), or bad ones take its place."""
    world: dict[str, Any] = {"right": lambda t: right, "guesses": lambda t: 0.3}
    mixed = SimulatedMachine(MIDDLE, **world).run(controller(MIDDLE, FALLBACK), 2000)
    head = SimulatedMachine(MIDDLE, **world).run(controller(MIDDLE), 2000)
    assert head.share("draft", 500) > 0.9
    assert mixed.speedup(500) > gain * head.speedup(500)


@pytest.mark.slow
def test_a_fallback_that_turns_bad_and_good_again() -> None:
    """Bugs: it drafts on, at a price; it is forgotten. Its guesses are right until cycle 1,000, and from 2,000 on."""
    right: Course = lambda t: 0.0 if 1000 <= t < 2000 else 0.7  # noqa: E731
    costs = curve(0.05, 0.05)
    machine = SimulatedMachine(costs, skill=useless, right=right).run(controller(costs, FALLBACK), 5000)
    seconds = sum(seconds for _, seconds in machine.per_cycle[1000:2000])
    assert seconds < 1.03 * 1000 * costs.plain()
    always = SimulatedMachine(costs, right=lambda t: 0.7).run(FixedPolicy(None, FALLBACK), 500)
    assert machine.speedup(4000) > 0.9 * always.speedup()


@pytest.mark.slow
def test_the_head_is_compared_with_the_fallback_of_today() -> None:
    """Bug: the head (good from 200 on) stays dormant when the fallback (until 1,500) has become worse."""
    machine = SimulatedMachine(skill=lambda t: 0.0 if t < 200 else 1.0, right=lambda t: 0.9 if t < 1500 else 0.0)
    machine.run(controller(fallback=FALLBACK), 4000)
    assert machine.share("base", 300, 1500) > 0.8
    assert machine.speedup(1700) > 0.9 * SimulatedMachine().run(controller(), 1500).speedup()


@pytest.mark.slow
@pytest.mark.parametrize("costs", [FLAT, curve(0.0, 0.02), curve(0.1, 0.05), curve(0.05, 0.2)])
def test_a_good_heads_tree_is_nearly_the_best(costs: Costs) -> None:
    """Bug: what is learnt leads to a worse tree than the best of a grid, or trials eat the gain."""
    sizes = itertools.product((4, 8, 16, 32), (2, 3, 5), (1, 2, 4))
    grid = [TreeSize(n, d, b) for n, d, b in sizes if d < n <= 1 + b + (d - 1) * b * b]
    best = max(SimulatedMachine(costs).run(FixedPolicy(shape), 400).speedup() for shape in grid)
    machine = SimulatedMachine(costs).run(controller(costs), 1500)
    assert machine.speedup() > 0.95 * best
    assert machine.speedup(500) > 0.96 * best


@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_pays_does_not_stay_dormant_by_bad_luck(seed: int) -> None:
    """Bug: a few unlucky cycles decide for hundreds. With 4 seeds; of 300 cycles, the first ones of a text included."""
    machine = SimulatedMachine(MIDDLE, seed=seed).run(controller(MIDDLE, FALLBACK), 300)
    assert machine.share("draft") + machine.share("explore") > 0.9


@pytest.mark.slow
def test_it_returns_when_drafts_pay_again() -> None:
    """Bug: once dormant, always dormant; or it goes on drafting what is refused. Useless from cycle 300 to 800 only."""
    machine = SimulatedMachine(skill=lambda t: 0.0 if 300 <= t < 800 else 1.0).run(controller(), 4000)
    assert machine.share("base") < 0.5
    assert machine.share("base", 350, 800) > 0.7
    assert machine.speedup(3000) > 0.9 * SimulatedMachine().run(controller(), 1000).speedup(500)


@pytest.mark.slow
def test_trials_of_a_useless_head_become_rarer_up_to_a_limit() -> None:
    """Bugs: trials that come as often as ever eat what plain decoding saves; or the next one never comes."""
    machine = SimulatedMachine(skill=useless).run(controller(), 12_000)
    drafted = [decision.drafts_every_row for decision in machine.decisions]
    starts = [t for t, pair in enumerate(pairwise(drafted)) if pair == (False, True)]
    waits = [b - a for a, b in pairwise(starts)]
    assert len(waits) >= 4
    assert waits[-1] > 2 * waits[0]
    assert max(waits) < 4000


@pytest.mark.slow
@pytest.mark.parametrize("hiccup", [5, 40, 200, 201, 203])
def test_one_slow_cycle_says_nothing(hiccup: int) -> None:
    """Bug: the machine holds one cycle up, and a good head becomes dormant, or a useless one drafts."""
    pace: Course = lambda t: 50.0 if t == hiccup else 1.0  # noqa: E731
    assert SimulatedMachine(pace=pace).run(controller(), 600).share("base") < 0.05
    assert SimulatedMachine(skill=useless, pace=pace).run(controller(), 600).share("base") > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("pace", [lambda t: 2.0 if t >= 250 else 1.0, lambda t: 1.0 if t >= 250 else 2.0])
def test_a_machine_that_changes_its_speed(pace: Course) -> None:
    """Bug: cycles of a slow hour are compared with those of a fast one for long."""
    assert SimulatedMachine(pace=pace).run(controller(), 900).share("base") < 0.05
    machine = SimulatedMachine(skill=useless, right=lambda t: 0.7, pace=pace).run(controller(fallback=FALLBACK), 1000)
    assert sum(decision.drafts_every_row for decision in machine.decisions[100:]) < 90


@pytest.mark.slow
def test_a_smaller_tree_comes_before_none() -> None:
    """Bug: where nodes cost much and the head is half right, small trees pay, but it becomes dormant."""
    costs = curve(0.12, 0.02)
    machine = SimulatedMachine(costs, skill=half).run(controller(costs), 1500)
    small = (TreeSize(2, 1, 1), TreeSize(3, 1, 2), TreeSize(4, 2, 2))
    best = max(SimulatedMachine(costs, skill=half).run(FixedPolicy(shape), 500).speedup() for shape in small)
    assert best > 1.1
    assert machine.speedup(300) > 0.95 * best
    used = Counter(decision.tree_size for decision in machine.decisions if decision.tree_size)
    assert used.most_common(1)[0][0].nodes <= 6


def test_a_method_whose_trees_do_not_grow() -> None:
    """Bug: suffix and its like are not controlled, or a tree's size is asked of them."""
    good, bad = (SimulatedMachine(skill=lambda t, s=s: s).run(controller(grows=False), 800) for s in (1.0, 0.0))
    assert good.share("base") < 0.1
    assert bad.share("base") > 0.9
    assert {decision.tree_size for decision in good.decisions + bad.decisions} == {None}


def test_each_number_of_rows_is_judged_for_itself() -> None:
    """Bug: eight rows are judged by what one takes. Nodes are cheap for one row here, dear for eight."""
    nodes = (1, 2, 4, 8, 16, 32, 64)
    costs = Costs(256, nodes, (1.0, 1.0, 1.0, 1.0, 3.0, 6.0, 12.0), (1, 4), (0.05, 0.05), (0.05, 0.05), 0.0, 0.0)
    policy = controller(costs)
    one = SimulatedMachine(costs, skill=half).run(policy, 300)
    many = SimulatedMachine(costs, skill=half, rows=8).run(policy, 300)
    assert one.share("base") < 0.1
    assert many.share("base", 100) > 0.8
    again = SimulatedMachine(costs, skill=half).run(policy, 100)
    assert again.share("base") < 0.2, "what was learnt of one row is forgotten"


def test_sampled_children_are_left_alone() -> None:
    """Bug: what a seed gives depends on the clock where children are sampled."""
    policy = AdaptiveController(lambda: FLAT, samples_children=True)
    assert policy.decide(cycle_of(2, Sampling(1.0))) == Decision(arm="sampled children")
    assert policy.decide(cycle_of(2)).plain == {0, 1}
    assert AdaptiveController(lambda: FLAT).decide(cycle_of(2, Sampling(1.0))).plain == {0, 1}


def test_costs_are_asked_for_once_and_late() -> None:
    """Bug: loading waits for a measurement that may never be needed, or it is made twice."""
    asked: list[int] = []

    def costs() -> Costs:
        asked.append(1)
        return FLAT

    policy = AdaptiveController(costs, LIMIT)
    assert not asked
    SimulatedMachine().run(policy, 100)
    SimulatedMachine(rows=3).run(policy, 100)
    assert asked == [1]


@pytest.mark.slow
def test_larger_trees_are_explored_within_their_budget() -> None:
    """Bug: a good head's cycles are given away to larger trees; or a deeper one is never tried."""
    machine = SimulatedMachine().run(controller(), 2000)
    further = [
        FLAT.cycle(explored.tree_size) / FLAT.cycle(before.tree_size) - 1
        for before, explored in pairwise(machine.decisions)
        if explored.arm == "explore" and before.tree_size is not None and explored.tree_size is not None
    ]
    assert len(further) >= 5
    assert sum(further) < 1.5 * MAX_EXPLORE_SHARE * 2000
    assert machine.share("base", 300) < 0.02


def test_is_dormant_says_what_the_next_cycle_does() -> None:
    """Bug: a prompt waits for a head that drafts in the very next cycle, or is read by a dormant one."""
    policy = controller()
    assert not policy.is_dormant(1), "nothing is known yet"
    machine, seen = SimulatedMachine(skill=useless), set[bool]()
    for _ in range(200):
        machine.run(policy, 1)
        seen.add(policy.is_dormant(1))
        assert policy.is_dormant(1) == (not policy.decide(cycle_of()).drafts_every_row)
    assert seen == {True, False}
    assert not policy.is_dormant(4)


def test_a_waking_head_starts_planning_afresh() -> None:
    """Bug: what was counted before dormancy goes on: first trees are not learnt from, plans come late."""
    machine, policy = SimulatedMachine(skill=lambda t: 0.0 if 400 <= t < 460 else 1.0), controller()
    machine.run(policy, 400)
    (state,) = policy._states.values()
    assert state.drafted > 300
    state.explore_debt = 5.0
    while not policy.is_dormant(1):
        machine.run(policy, 1)
    while policy.is_dormant(1):
        machine.run(policy, 1)
    assert (state.drafted, state.explore_debt) == (0, 0.0)
    assert state.learn_interval == 1
    explored = machine.run(policy, CYCLES_BEFORE_EXPLORING + 1).decisions[-CYCLES_BEFORE_EXPLORING - 1 :]
    assert [decision.arm for decision in explored] == ["draft"] * CYCLES_BEFORE_EXPLORING + ["explore"]


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_another_tree_begins_with_what_is_expected_of_it(pace: float) -> None:
    """Bug: a new tree is judged by the one before; a quiet machine's costs are taken for a busy one's."""
    machine, policy = SimulatedMachine(MIDDLE, pace=lambda t: pace), controller(MIDDLE)
    sizes = []
    for _ in range(60):
        machine.run(policy, 1)
        (state,) = policy._states.values()
        arm = state.bandit.arms["draft"]
        if sizes and state.size != sizes[-1]:
            assert arm.kinds == {}
            expected = policy._expected(state.size, 1)
            assert arm.seconds(state.bandit.medians) == pytest.approx(pace * expected.seconds, rel=0.02)
            assert arm.mean == pytest.approx(1 + expected.accepted)
        sizes.append(state.size)
    assert len(set(sizes)) > 1
