"""spectr: k-SEQ keeps the target's joint law with the shipped random numbers, and accepts what its theory says.

The joint law is tested as in tests/core/test_joint_law.py: 40,000 rows decode five tokens, and the counts of all texts
are compared with the exact probabilities (z > 4 has odds of about 1 in 10,000; seeds are fixed). The power: numbers
that are read twice, and a rule without its residual, must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from core.test_joint_law import Q_SV, ROWS, ReadTwice, decode, net_steps, noise_of, z_of
from eyas.core.drafter import CycleInput
from eyas.core.options import build_options
from eyas.core.row_drafts import limit_nodes
from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Draft, Tree
from eyas.core.verify import verify
from eyas.drafters.tools import grow_static
from eyas.errors import OptionError
from eyas_lab.methods import method_spectr
from eyas_lab.methods.method_spectr import Options, transport, united


def drawn(chains: int, depth: int, limited: bool = False) -> Callable[[CycleInput, Tensor], Draft]:
    """`limited`: every second row may have two draft tokens."""
    choices = Options(depth=depth, drafts=chains).choices()

    def rule(cycle: CycleInput, state_B: Tensor) -> Draft:
        draft = united(grow_static(net_steps(state_B, Q_SV), cycle, choices, "independent"), chains)
        if not limited:
            return draft
        odd_B = torch.arange(len(state_B)) % 2 == 1
        return limit_nodes(replace(draft, deterministic_B=odd_B), [2 if odd else None for odd in odd_B.tolist()])

    return rule


@pytest.mark.slow
@pytest.mark.parametrize(("chains", "depth", "limited"), [(3, 3, False), (2, 4, False), (1, 4, False), (3, 2, True)])
def test_the_joint_law_is_the_targets(chains: int, depth: int, limited: bool) -> None:
    """Guards rho, the residual, and which chains go on after an accepted token."""
    assert abs(z_of(decode(drawn(chains, depth, limited), noise_of(GumbelNoise)))) < 4


@pytest.mark.slow
def test_faults_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above."""
    assert z_of(decode(drawn(3, 3), noise_of(ReadTwice, ROWS // 4))) > 20
    monkeypatch.setattr(method_spectr, "transport", lambda p, q, count: (transport(p, q, count)[0], p))
    assert z_of(decode(drawn(3, 3), noise_of(GumbelNoise, ROWS // 4))) > 20


def shape_of(chains: int, depth: int = 1) -> Tree:
    """The tree of chains that share no nodes."""
    parents = [-1, *[0] * chains, *range(1, 1 + chains * (depth - 1))]
    return Tree.build(torch.tensor([parents]), depth)


def pairs(cases: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    p_BV, q_BV = (2 * torch.randn(2, cases, vocab, generator=generator)).softmax(-1).double()
    return p_BV, q_BV


def k_seq_accepts(p_BV: Tensor, q_BV: Tensor, k: int) -> Tensor:
    rho_B1, _ = transport(p_BV, q_BV, torch.full((len(p_BV),), k))
    return 1 - (1 - torch.minimum(q_BV, p_BV / rho_B1).sum(-1)) ** k


def rejection_accepts(p_BV: Tensor, q_BV: Tensor, k: int) -> Tensor:
    """Recursive rejection of k independent draws (SpecInfer)."""
    refused_B = torch.ones(len(p_BV), dtype=torch.double)
    for _ in range(k):
        refused_B = refused_B * (1 - torch.minimum(p_BV, q_BV).sum(-1))
        rest_BV = (p_BV - q_BV).clamp(min=0)
        p_BV = rest_BV / rest_BV.sum(-1, keepdim=True)
    return 1 - refused_B


@pytest.mark.parametrize("vocab", [3, 40])
def test_more_is_accepted_than_by_recursive_rejection(vocab: int) -> None:
    """Guards rho: with another number k-SEQ accepts less, or its residual is negative. Both rules verify four
    independent draws; one draw is speculative sampling."""
    p_BV, q_BV = pairs(300, vocab)
    gain_B = k_seq_accepts(p_BV, q_BV, 4) - rejection_accepts(p_BV, q_BV, 4)
    assert gain_B.min() > -1e-9
    assert gain_B.max() > 0.03
    assert torch.allclose(k_seq_accepts(p_BV, q_BV, 1), torch.minimum(p_BV, q_BV).sum(-1))


def test_what_is_accepted_and_drawn() -> None:
    """Guards the tests of chains against the formula: 40,000 rows of one pair p, q accept the share that it gives, and
    their next tokens follow p (errors of five standard deviations)."""
    (p_1V, q_1V), chains = pairs(1, 5), 4
    noise, rows_B = noise_of(GumbelNoise), torch.arange(ROWS)
    gumbel_BKV = noise.gumbel(1 + torch.arange(chains).repeat(ROWS, 1), 5, GumbelNoise.DRAFT)
    chain_BK = (q_1V.float().log() + gumbel_BKV).argmax(-1)
    tokens_BN = torch.cat([torch.zeros_like(rows_B)[:, None], chain_BK], dim=1)
    draft = united(
        Draft(shape_of(chains).for_rows(ROWS), tokens_BN, q_BNV=q_1V.float().repeat(ROWS, chains + 1, 1)), chains
    )
    verdict = verify(draft, p_1V.float().log().repeat(ROWS, chains + 1, 1), torch.zeros_like(rows_B), noise)
    accepted_B, alpha = verdict.length_B > 1, float(k_seq_accepts(p_1V, q_1V, chains))
    assert abs(float(accepted_B.double().mean()) - alpha) < 5 * (alpha * (1 - alpha) / ROWS) ** 0.5
    token_B = torch.where(accepted_B, verdict.tokens_BP[:, 1], verdict.bonus_B)
    share_V = torch.bincount(token_B, minlength=5) / ROWS
    assert ((share_V - p_1V[0]).abs() < 5 * (p_1V[0] * (1 - p_1V[0]) / ROWS).sqrt()).all()


def test_equal_chains_share_nodes() -> None:
    """Guards the union of chains: the second chain leaves the first after a token, the third is the first again."""
    tokens_BN = torch.tensor([[0, 7, 7, 7, 1, 2, 1]])
    draft = united(Draft(shape_of(3, 2), tokens_BN, q_BNV=torch.ones(1, 7, 9) / 9), 3)
    assert draft.tree.parents_BN.tolist() == [[-1, 0, 0, 0, 1, 1, 1]]
    assert draft.tree.acceptable_BN.tolist() == [[True, True, False, False, True, True, False]]
    assert isinstance(draft.rule, partial)
    assert draft.rule.args[0].tolist() == [[[1, 4], [1, 5], [1, 4]]]


def test_trees_are_refused() -> None:
    with pytest.raises(OptionError, match="k-SEQ: leave dynamic, tree and verification out"):
        build_options(Options, {"dynamic.nodes": 9})
    with pytest.raises(OptionError, match="drafts must be a whole number"):
        build_options(Options, {"drafts": 0})
