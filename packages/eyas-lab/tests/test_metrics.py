"""Figures from hand-made steps and columns, where every number can be worked out on paper."""

from __future__ import annotations

import pytest
import torch

import zoo
from eyas.core.engine import Request, Step
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.totals import StepTotals, tau, tokens_per_second
from eyas.core.tree import Draft, Tree
from eyas_lab import metrics
from steps import step


def chain(accepted: int, drafted: int = 3, cut: bool = False) -> Step:
    """A cycle of a chain."""
    tree = (range(-1, drafted), [True] * (drafted + 1))
    return step(accepted, range(accepted + 1), tree, emitted=accepted if cut else None)


def test_totals() -> None:
    """Bugs: the prompt's own token counts as a cycle's, or the seconds begin with the second step."""
    totals = StepTotals()
    assert (totals.tau, totals.seconds, totals.cycles) == (0, 0, 0)
    totals.add(Step(1, (7,), None, seconds=2.0, ended_at=12.0))
    for one, ended_at in ((chain(3), 13.0), (chain(0), 15.0)):
        totals.add(Step(**{**vars(one), "ended_at": ended_at}))
    assert totals.token_ids == [7, 0, 1, 2, 3, 0]
    assert totals.accepted_lengths == [3, 0]
    assert (totals.cycles, totals.emitted, totals.tau) == (2, 5, 2.5)
    assert (totals.seconds, totals.prefill_seconds) == (5.0, 2.0)
    assert totals.decisions == {"fixed": 2}


def test_ratios_without_anything_under_them() -> None:
    """Bug: answers of one token divide by zero."""
    assert tau(0, 0) == tokens_per_second(0, 0) == tokens_per_second(0, 1) == 0
    assert (tau(6, 2), tokens_per_second(6, 2)) == (3, 3)


def test_cycles_of_steps() -> None:
    """Bugs: the tree's depth counts as drafted behind a node without children, padding counts as a
    child, a cut counts as a refusal."""
    steps = [
        step(0, (0,)),  # both children refused
        step(1, (0, 2)),  # 5 was there and refused
        step(2, (0, 1, 3)),  # nothing was drafted behind 3
        step(3, (0, 2, 5, 6)),  # nor behind 6
        step(1, (0, 2, 5), emitted=1, finish="stop"),  # cut at an accepted token: 5 was accepted, but not emitted
        step(0, (0,), ((-1, 0), (True, False))),
    ]
    assert [metrics.cycle_of(s).tested for s in steps] == [1, 2, 2, 3, 1, 0]
    cycle = metrics.cycle_of(steps[1], seconds=0.8)
    assert (cycle.nodes, cycle.candidates, cycle.accepted, cycle.accepted_uncut, cycle.seconds) == (7, 5, 1, 1, 0.8)


def test_n_alpha_by_hand() -> None:
    """Guards the definition: a share of the cycles whose earlier draft tokens were all accepted. An answer's end refuses nothing."""
    cycles = [metrics.cycle_of(s) for s in (chain(0), chain(2), chain(3), chain(1), chain(2, cut=True))]
    assert metrics.depth_counts(cycles, 3) == [(5, 4), (4, 3), (2, 1)]
    assert metrics.n_alpha(cycles, 3) == {"0-alpha": 4 / 5, "1-alpha": 3 / 4, "2-alpha": 1 / 2}
    assert metrics.acceptance_by_depth(cycles, 4)[3] is None


def test_only_what_was_drafted() -> None:
    """Bug: a token that nobody drafted, or a padding that could not be accepted, counts as refused."""
    tree = Tree.chain(2, 4)
    acceptable_BN = torch.tensor([[True, True, False, False], [True, True, True, True]])
    draft = Draft(Tree.build(tree.parents_BN, 3, acceptable_BN), torch.zeros(2, 4, dtype=torch.long))
    steps = [
        Step(1, tuple(range(accepted + 1)), None, tuple(range(accepted + 1)), draft, row)
        for row, accepted in ((0, 1), (0, 0), (1, 3), (1, 1))
    ]
    cycles = [metrics.cycle_of(s) for s in steps]
    assert metrics.depth_counts(cycles, 5) == [(4, 3), (2, 1), (1, 1), (0, 0), (0, 0)]
    assert set(metrics.n_alpha(cycles, 5)) == {"0-alpha", "1-alpha", "2-alpha"}
    unreported = metrics.Cycle(3, 2, 1.0)
    assert metrics.acceptance_by_depth([unreported], 2) == [None, None], "transformers does not report what it drafted"


def test_first_difference() -> None:
    """Guards the place, an end of one text included."""
    assert metrics.first_difference((1, 2), [1, 2]) is None
    assert metrics.first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert metrics.first_difference((1, 2, 3), (1, 2)) == 2


def test_margin() -> None:
    """Guards the scores that are compared: the logits behind prompt and prefix when greedy; with a
    single allowed token there is none."""
    target = Target(zoo.FAMILIES["llama"]())
    logits_V = target.model(torch.tensor([[5, 6, 7, 8]])).logits[0, -1].float()
    best, second = logits_V.topk(2).values.tolist()
    assert metrics.margin(target, Request((5, 6, 7), 4), [8]) == pytest.approx(best - second, rel=1e-3)
    assert metrics.margin(target, Request((5, 6, 7), 4, Sampling(temperature=1.0, top_k=1)), [8]) is None
    assert metrics.margin(target, Request((5, 6, 7), 4, Sampling(temperature=1.0, seed=3)), [8]) > 0
