"""The plan: what trees are expected to yield, and which one pays most."""

import random

import numpy as np
import pytest
import torch

import zoo
from curves import LIMIT, curve, drafted
from eyas.adaptive.cost import Costs
from eyas.adaptive.goodput import Acceptance, best, sizes
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters import CycleInput, TreeSize, find


def grown(shape: TreeSize, law: Sampling) -> Draft:
    """By a net, of one row."""
    target = Target(zoo.FAMILIES["llama"]())
    kind = find("eagle2")
    options = build_options(kind.Options, {"tree.nodes": 64, "tree.depth": 5, "tree.branch": 4})
    drafter = kind.random(target, options, seed=1)
    session, text = drafter.open(1), tuple(range(5, 40))
    session.begin(0, 0, len(text))
    target.open(1, drafter.feature_layers).prefill(0, text, lambda *chunk: session.prefill(0, *chunk))
    one_1, noise = torch.ones(1, dtype=torch.long), GumbelNoise.from_sampling((law,), target.device)
    row = (7 * one_1, len(text) * one_1, one_1 > 0, (law,), noise, len(text))
    roots = CycleInput(*row, active_rows=(0,), tree_size=shape)
    with torch.inference_mode():
        return session.draft(roots)


@pytest.mark.cover(shape=2)
@pytest.mark.parametrize("law", [Sampling(), Sampling(1.0, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [TreeSize(4, 3, 3), TreeSize(12, 5, 4), TreeSize(64, 4, 2)])
def test_other_trees_yields_are_read_from_all_that_was_drafted(shape: TreeSize, law: Sampling) -> None:
    """Bug: nodes that another tree would have kept are not learnt, against trees that the same net grows there."""
    draft, acceptance = grown(shape, law), Acceptance(TreeSize(64, 5, 4))
    everything = draft.drafted.parents_BX[0].tolist(), draft.drafted.value_BX[0].tolist()
    kept = draft.tree.parents_BN[0].tolist(), draft.value_BN[0].tolist()  # type: ignore[index]
    assert len(everything[0]) == 1 + shape.branch + (shape.depth - 1) * shape.branch**2
    acceptance.learn(*kept, shape, 1, everything)
    seen = 0
    for other in acceptance.all_sizes:
        if other.depth <= shape.depth and other.branch <= shape.branch and other.nodes <= len(everything[0]):
            values_BN = grown(other, law).value_BN
            promised = float(acceptance._mean_ADGE[acceptance._cell(other)].sum())
            assert promised == pytest.approx(float(values_BN[0, 1:].exp().sum()), abs=1e-5), other
            seen += other.nodes > shape.nodes
    assert seen or shape.nodes == 64


def test_the_plan_is_the_best_of_all() -> None:
    """Bug: sizes are passed over, or costs and yields do not belong together."""
    dice = random.Random(0)
    for seed in range(20):
        acceptance, costs = Acceptance(LIMIT), curve(dice.choice([0.0, 0.01, 0.1, 0.5]), dice.choice([0.0, 0.1, 0.4]))
        acceptance.learn(*drafted(seed), LIMIT, dice.randrange(6))
        found = best(sizes(LIMIT), acceptance.accepted_S, np.array([costs.cycle(s) for s in sizes(LIMIT)]))
        rates = {s: (1 + acceptance(s)) / costs.cycle(s) for s in sizes(LIMIT)}
        assert found.rate == pytest.approx(max(rates.values()))
        assert rates[found.size] == pytest.approx(found.rate)


def planned(costs: Costs, acceptance: Acceptance) -> tuple[TreeSize, float]:
    found = best(acceptance.all_sizes, acceptance.accepted_S, np.array([costs.cycle(s) for s in acceptance.all_sizes]))
    return found.size, found.rate * costs.plain()


def test_confidences_are_held_to_what_came() -> None:
    """Bug: a head that is never right keeps its large tree; one right at depth 1 only keeps a deep one."""
    useless, shallow = Acceptance(LIMIT), Acceptance(LIMIT)
    for seed in range(40):
        useless.learn(*drafted(seed), LIMIT, 0)
        shallow.learn(*drafted(seed), LIMIT, 1)
    assert useless(TreeSize(32, 5, 4)) < 0.3
    assert planned(curve(0.05, 0.1), useless)[1] < 1
    assert shallow(TreeSize(5, 1, 4)) == pytest.approx(1, abs=0.3)
    assert shallow(TreeSize(32, 5, 4)) - shallow(TreeSize(5, 1, 4)) < 0.3
    assert planned(curve(0.02, 0.2), shallow)[0].depth == 1


@pytest.mark.parametrize(("truth", "says"), [(0.9, 0.5), (0.6, 0.9), (0.3, 0.35)])
def test_heads_that_are_too_modest_or_too_bold(truth: float, says: float) -> None:
    """Bug: a modest head is held to be right more than always; a bold one is believed."""
    acceptance, dice, limit = Acceptance(TreeSize(6, 5, 1)), random.Random(0), TreeSize(4, 3, 1)
    for _ in range(300):
        accepted = next((d for d in range(3) if dice.random() > truth), 3)
        acceptance.learn([-1, 0, 1, 2], [0.0, *(d * float(np.log(says)) for d in (1, 2, 3))], limit, accepted)
    assert acceptance(limit) == pytest.approx(truth + truth**2 + truth**3, abs=0.25)
    assert acceptance(limit) <= acceptance(TreeSize(6, 5, 1)) <= 5
