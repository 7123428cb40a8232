"""n-alpha of real chains."""

from __future__ import annotations

import pytest

import zoo
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import find
from eyas.drafters._grow import DynamicTree
from eyas.drafters.eagle2 import Method
from eyas_train.alpha import chain_figures, last_prompt
from eyas_train.data import Example


@pytest.mark.slow
def test_heads_that_draft_less_than_asked_for() -> None:
    """Guards the figures of methods with a head for each token: one head drafts one token, so there
    is no 1-alpha to be zero."""
    kind = find("medusa")
    one = kind.init_for_training(Target(zoo.FAMILIES["llama"]()), build_options(kind.Options, {"head.count": 1}))
    figures = chain_figures([Example(list(range(20)), [False] * 10 + [True] * 10)], new_tokens=60, tree_prompts=0)(one)
    assert figures["0-alpha"] > 0, "what a head says must come true now and then, or this test proves little"
    assert "1-alpha" not in figures


def test_last_prompt_of_plain_text() -> None:
    """Guards the mutant that took the whole text, or none of it: where every token counts there is
    no last answer, so half the text is the prompt."""
    assert last_prompt(Example([5, 6, 7, 8, 9], [True] * 5)) == (5, 6)
    assert last_prompt(Example([5, 6, 7, 8], [True] * 4)) == (5, 6)
    assert last_prompt(Example([5, 6, 7, 8], [False, True, True, True])) == (5,)  # one that does not count: a chat
    turns = [False, True, True, False, False, True, True, False]  # an answer begins before the last stretch that counts
    assert last_prompt(Example(list(range(8)), turns)) == (0, 1, 2, 3, 4)


def test_tau_of_the_drafters_own_tree() -> None:
    """Guards that the tree is the drafter's own, not the chain: a tree that holds the whole
    vocabulary is right once a cycle at least."""
    target, examples = Target(zoo.FAMILIES["llama"]()), [Example(list(range(20)), [False] * 10 + [True] * 10)]
    wide = Method.random(target, Method.Options(tree=DynamicTree(nodes=zoo.VOCAB + 1, depth=1, branch=zoo.VOCAB)))
    assert chain_figures(examples, new_tokens=9)(wide)["tau"] == 2
    assert "tau" not in chain_figures(examples, new_tokens=9, tree_prompts=0)(wide)
