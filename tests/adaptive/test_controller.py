"""The controller on simulated machines: seconds are made up, so nothing here depends on this machine's clock."""

import itertools

import pytest

from curves import curve
from eyas.adaptive import AdaptiveController
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
@pytest.mark.parametrize("costs", [FLAT, curve(0.0, 0.02), curve(0.1, 0.05), curve(0.05, 0.2)])
def test_a_good_heads_tree_is_nearly_the_best(costs: Costs) -> None:
    """Bug: what is learnt leads to a worse tree than the best of a grid, or trials eat the gain."""
    sizes = itertools.product((4, 8, 16, 32), (2, 3, 5), (1, 2, 4))
    grid = [TreeSize(n, d, b) for n, d, b in sizes if d < n <= 1 + b + (d - 1) * b * b]
    best = max(SimulatedMachine(costs).run(FixedPolicy(shape), 400).speedup() for shape in grid)
    machine = SimulatedMachine(costs).run(controller(costs), 1500)
    assert machine.speedup() > 0.95 * best
    assert machine.speedup(500) > 0.96 * best


@pytest.mark.slow
def test_it_returns_when_drafts_pay_again() -> None:
    """Bug: once dormant, always dormant; or it goes on drafting what is refused. Useless from cycle 300 to 800 only."""
    machine = SimulatedMachine(skill=lambda t: 0.0 if 300 <= t < 800 else 1.0).run(controller(), 4000)
    assert machine.share("base") < 0.5
    assert machine.share("base", 350, 800) > 0.7
    assert machine.speedup(3000) > 0.9 * SimulatedMachine().run(controller(), 1000).speedup(500)


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
