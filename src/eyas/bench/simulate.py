"""Verification with given acceptance rates, for targets whose weights say nothing: a model of a real size with random weights.

Drafting, the target's pass, processing and commits are done and measured as ever. Only which nodes are accepted is decided by lot: a draft
token at depth d is accepted with rate a_d, given that all before it were. The text is not the target's, and every report says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.decode import Verify
from eyas.errors import OptionError
from eyas.sampling import Noise
from eyas.tree import Draft, Verdict
from eyas.verify import verify

__all__ = ["expected_tau", "parse_rates", "simulated"]


def parse_rates(text: str) -> tuple[float, ...]:
    """ "0.8,0.75" -> (0.8, 0.75): of depth 1, 2; the last one holds for all deeper ones. OptionError when they are no rates."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"--simulate-acceptance takes rates by depth like 0.8,0.75,0.7; got {text!r}") from error
    if not all(0 <= rate <= 1 for rate in rates):
        raise OptionError(f"--simulate-acceptance: rates lie between 0 and 1, got {text!r}")
    return rates


def expected_tau(rates: Sequence[float], depth: int) -> float:
    """Tokens per cycle of a tree of that depth."""
    total = reach = 1.0
    for d in range(depth):
        reach *= rates[min(d, len(rates) - 1)]
        total += reach
    return total


def simulated(rates: Sequence[float], seed: int = 0) -> Verify:
    """A stand-in for `verify`: down the tree, always to the first candidate child, as far as the lot allows."""
    dice = torch.Generator().manual_seed(seed)

    def decide(draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: Noise) -> Verdict:
        verify(draft, scores_BNV, position_B, noise)  # its time counts, what it says does not
        tree, (B, P) = draft.tree, (draft.tree.rows, draft.tree.max_depth + 1)
        parents, candidates = tree.parents_BN.tolist(), tree.candidate_BN.tolist()
        luck = torch.rand(B, P, generator=dice).tolist()
        path = torch.full((B, P), -1, dtype=torch.long)
        for b in range(B):
            node, path[b, 0] = 0, 0
            for depth in range(1, P):
                children = [n for n, parent in enumerate(parents[b]) if parent == node and candidates[b][n]]
                if not children or luck[b][depth - 1] >= rates[min(depth - 1, len(rates) - 1)]:
                    break
                node = children[0]
                path[b, depth] = node
        path_BP = path.to(draft.tokens_BN.device)
        length_B = (path_BP >= 0).sum(-1)
        tokens_BP = torch.where(path_BP >= 0, draft.tokens_BN.gather(1, path_BP.clamp(min=0)), 0)
        last_B1 = path_BP.gather(1, length_B[:, None] - 1)
        bonus_B = scores_BNV.argmax(-1).gather(1, last_B1)[:, 0]
        return Verdict(path_BP, tokens_BP, length_B, bonus_B)

    return decide
