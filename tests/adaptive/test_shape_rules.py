"""A policy may use the past, but not the drawn tokens: keeping a node because of its token changes the law of the text,
as rejected nodes count too. By enumeration of every draw through the shipped verification."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.test_verify import TOLERANCE, Cut, ToyModels, check_exact, drawn_cycle, law_of
from eyas.core.dormant import _without_drafts
from eyas.core.row_drafts import limit_nodes
from eyas.core.tree import Draft, Tree


def by_its_own_token(world: ToyModels) -> Cut:
    """The wrong rule: nodes whose own probability is small are not verified."""

    def cut(start_B: Tensor, draft: Draft) -> Draft:
        tree = draft.tree
        q_BNV = draft.q_BNV.gather(1, tree.parents_BN.clamp(min=0)[..., None].expand_as(draft.q_BNV))
        kept_BN = (q_BNV.gather(2, draft.tokens_BN[..., None])[..., 0] > 0.4) | (tree.parents_BN < 0)
        kept_BN = (kept_BN[:, None] | ~tree.mask_BNN).all(-1)
        return replace(draft, tree=replace(tree, acceptable_BN=tree.acceptable_BN & kept_BN))

    return cut


def by_the_past(world: ToyModels) -> Cut:
    """The Decoder's cut for a decision from before the draft: here every other prefix has no draft."""

    def cut(start_B: Tensor, draft: Draft) -> Draft:
        return _without_drafts(draft, frozenset((start_B % 2).nonzero()[:, 0].tolist()))

    return cut


def by_its_place(world: ToyModels) -> Cut:
    """The limit of a request (`Request.drafting`), of about every other prefix: at most two nodes."""
    return lambda start_B, draft: limit_nodes(draft, [2 if start % 2 else None for start in start_B.tolist()])


@pytest.mark.quick("pair", "chain")
@pytest.mark.parametrize("name", ["chain", "pair", "binary"])
def test_a_rule_that_looks_at_drawn_tokens_is_biased_and_ours_are_not(name: str) -> None:
    """Bug: a policy, a limit, or a tree's pruning, sees what was drawn in this cycle. Every event is weighed."""
    depth, vocab = {"chain": 3, "pair": 1, "binary": 2}[name], 3
    world = ToyModels(vocab, depth + 3)
    for cut in (by_the_past(world), by_its_place(world)):
        check_exact(world, drawn_cycle(name, cut=cut), depth + 2, 2)
    wrong = law_of(world, drawn_cycle(name, cut=by_its_own_token(world)), depth + 2, 2)
    assert abs(float(wrong.sum()) - 1) < TOLERANCE
    assert float((wrong - world.true_law(depth + 2)).abs().sum()) > 0.01, "the wrong rule does no harm here"


def test_sleeping_rows_alone_lose_their_nodes() -> None:
    """Bug: the padding of one row's nodes falls on another's, or takes the root with it."""
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1]]).repeat(3, 1), 2)
    cut = _without_drafts(Draft(tree, torch.arange(12).view(3, 4)), frozenset({1}))
    assert cut.tree.acceptable_BN.tolist() == [[True] * 4, [True, False, False, False], [True] * 4]
    assert tree.acceptable_BN.all(), "the draft itself was changed"
