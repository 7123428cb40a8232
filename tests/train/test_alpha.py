"""n-alpha from hand-made steps, and from real chains."""

from __future__ import annotations

from dataclasses import replace

import torch

import zoo
from eyas.core.drafter import build_options
from eyas.core.engine import Step
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree
from eyas.drafters import find
from eyas.drafters._grow import DynamicTree
from eyas.drafters.eagle2 import Method
from eyas.train.alpha import acceptance_by_depth, chain_figures, figures_of, last_prompt
from eyas.train.data import Example


def step(accepted: int, tokens: int, finish: str | None = None) -> Step:
    return Step(1, tuple(range(tokens)), accepted, False, finish)


def test_by_hand() -> None:
    """Guards the definition: given that all earlier drafts were accepted; a cut at the end is no refusal."""
    steps = [Step(1, (5,), 0, True, None), step(0, 1), step(2, 3), step(3, 4), step(1, 2), step(2, 2, "length")]
    assert acceptance_by_depth(steps, 3) == [(5, 4), (4, 3), (2, 1)]
    figures = figures_of(steps, 3)
    assert figures["0-alpha"] == 4 / 5
    assert figures["2-alpha"] == 1 / 2
    assert figures["chain tau"] == 12 / 5


def test_only_what_was_drafted() -> None:
    """Guards chains shorter than asked for: a token that nobody drafted, or a padding that could not be accepted, was not refused."""
    tree = Tree.chain(2, 4)
    candidate_BN = torch.tensor([[True, True, False, False], [True, True, True, True]])
    tree = Tree.build(tree.parents_BN, 3, candidate_BN)
    draft = Draft(tree, torch.zeros(2, 4, dtype=torch.long))
    steps = [replace(step(accepted, accepted + 1), draft=draft, row=row) for row, accepted in ((0, 1), (0, 0), (1, 3), (1, 1))]
    assert acceptance_by_depth(steps, 5) == [(4, 3), (2, 1), (1, 1), (0, 0), (0, 0)]
    assert set(figures_of(steps, 5)) == {"0-alpha", "1-alpha", "2-alpha", "chain tau"}


def test_heads_that_draft_less_than_asked_for() -> None:
    """Guards the figures of methods with a head for each token: one head drafts one token, so there is no 1-alpha to be zero."""
    kind = find("medusa")
    one = kind.init_for_training(Target(zoo.FAMILIES["llama"]()), build_options(kind.Options, {"head.count": 1}))
    figures = chain_figures([Example(list(range(20)), [False] * 10 + [True] * 10)], new_tokens=60, tree_prompts=0)(one)
    assert figures["0-alpha"] > 0, "what a head says must come true now and then, or this test proves little"
    assert "1-alpha" not in figures


def test_last_prompt() -> None:
    """Guards where an answer begins: before the last stretch of counted tokens."""
    counted = [False, True, True, False, False, True, True, False]
    assert last_prompt(Example(list(range(8)), counted)) == (0, 1, 2, 3, 4)


def test_from_real_chains() -> None:
    """Guards the path that training takes."""
    figures = chain_figures([Example(list(range(20)), [False] * 10 + [True] * 10)], new_tokens=12)(
        Method.random(Target(zoo.FAMILIES["llama"]()))
    )
    assert 0 <= figures["0-alpha"] <= 1 <= figures["chain tau"]


def test_tau_of_the_drafters_own_tree() -> None:
    """Guards that the tree is the drafter's own, not the chain: a tree that holds the whole vocabulary is right once a cycle at least."""
    target, examples = Target(zoo.FAMILIES["llama"]()), [Example(list(range(20)), [False] * 10 + [True] * 10)]
    wide = Method.random(target, Method.Options(tree=DynamicTree(nodes=zoo.VOCAB + 1, depth=1, branch=zoo.VOCAB)))
    assert chain_figures(examples, new_tokens=9)(wide)["tau"] == 2
    assert "tau" not in chain_figures(examples, new_tokens=9, tree_prompts=0)(wide)
