"""Drafts under constraints: heads propose what the constraint allows."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import zoo
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Verdict
from reference import plain_decode, run
from test_lossless import make
from wishes import wished


class Alternating:
    """A toy constraint: odd tokens after even ones, even tokens after odd ones, without an end."""

    def __init__(self, vocab: int, fails: bool = False) -> None:
        self.vocab, self.fails, self.accepted = vocab, fails, 0

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        if self.fails and self.accepted >= 4:
            raise RuntimeError("no mask")
        mask_NV = (torch.arange(self.vocab) + torch.tensor(tokens)[:, None]) % 2 == 1
        forbidden = [False]
        for parent, token in zip(parents[1:], tokens[1:], strict=True):
            forbidden.append(forbidden[parent] or not mask_NV[parent, token])
        return mask_NV | torch.tensor(forbidden)[:, None]

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted += len(tokens)

    finished = False

    def forced(self, limit: int) -> list[int]:
        return []


@pytest.mark.cover
@pytest.mark.quick("eagle2-sampled", "medusa-sampled")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name",
    ["eagle1", "eagle2", "eagle3", "seagle", "medusa", "hydra", "dflash", "dflash2", "dspark", "pard", "peagle", "mtp"],
)
def test_every_drafted_node_is_allowed(name: str, sampling: Sampling) -> None:
    """Guards the masks of growing trees, at every level: no candidate where the target gives it no chance."""
    target = Target(zoo.tiny("llama"))
    drafted = 0

    def watch(cycle_input: CycleInput, draft: Draft, scores_BNV: Tensor, verdict: Verdict) -> None:
        nonlocal drafted
        tree = draft.tree
        for node in tree.acceptable_BN[0].nonzero().flatten().tolist()[1:]:
            drafted += 1
            assert scores_BNV[0, int(tree.parents_BN[0, node]), int(draft.tokens_BN[0, node])] > -torch.inf

    request = wished((5, 8, 3), 20, sampling, constraint=Alternating(zoo.VOCAB))
    ((tokens,), _) = run(Decoder(target, make(name, target), watch=watch), [request])
    assert drafted > 20
    assert all((a + b) % 2 for a, b in zip([3, *tokens], tokens, strict=False))
    if sampling.greedy:
        assert tokens == plain_decode(target.model, request)
