"""Verification with given acceptance rates, for targets whose text means nothing: a model of a real
size with random weights.

Drafting, the target's pass, processing and commits are done and measured as ever. Only the accepted nodes are
drawn at random. A draft token at depth d is accepted with rate a_d, given that all before it were, along the
path to the deepest one. A tree of depth n emits 1 + a_1 + a_1 a_2 + ... + a_1 ... a_n tokens a cycle. The last
one is the bonus that verification found. The text is not the target's, and every report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from eyas.core.engine import Verify
from eyas.core.ops import REFERENCE, Ops
from eyas.core.sampling import GumbelNoise
from eyas.core.tree import Draft, Verdict
from eyas.core.verify import verify
from eyas.errors import OptionError

__all__ = ["parse_rates", "simulated"]

_STRIDE = 2**20  # distance of the noise's positions of one root token from those of the next


def parse_rates(text: str) -> tuple[float, ...]:
    """ "0.8,0.75" -> (0.8, 0.75): of depth 1, 2; the last one holds for all deeper ones.
    Raise OptionError if they are not rates."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"--simulate-acceptance takes rates by depth like 0.8,0.75,0.7; got {text!r}") from error
    if not all(0 <= rate <= 1 for rate in rates):
        raise OptionError(f"--simulate-acceptance: rates must be between 0 and 1, got {text!r}")
    return rates


def simulated(rates: Sequence[float], seed: int = 0) -> Verify:
    """A replacement of `verify` that accepts along the path to a deepest acceptable node, at these
    rates."""
    return _Simulated(tuple(rates), seed)


class _Simulated:
    """The draw of a cycle depends on the seed, the root's position and its token alone; it is
    computed on the device (`GumbelNoise`)."""

    on_device = True

    def __init__(self, rates: tuple[float, ...], seed: int) -> None:
        self.rates, self.seed = rates, seed
        # by device and depth: a recorded cycle makes no tensor of host values
        self._rates_P: dict[tuple[torch.device, int], Tensor] = {}

    def _rates(self, depth: int, device: torch.device) -> Tensor:
        """float64 [depth]: the rate of each depth from 1 on."""
        if (device, depth) not in self._rates_P:
            rates = [self.rates[min(d, len(self.rates) - 1)] for d in range(depth)]
            self._rates_P[device, depth] = torch.tensor(rates, dtype=torch.float64, device=device)
        return self._rates_P[device, depth]

    def __call__(
        self, draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise, ops: Ops = REFERENCE
    ) -> Verdict:
        real = verify(draft, scores_BNV, position_B, noise, ops)  # its time counts, what it accepts does not
        tree, (B, P), device = draft.tree, (draft.tree.rows, draft.tree.max_depth + 1), position_B.device
        given_path = getattr(ops, "given_path", None)  # of GPU kernels
        if given_path is not None and real.host_result_BX is not None and real.has_nan_B is not None:
            rates_D = self._rates(P - 1, device)
            return cast(Verdict, given_path(draft, real, position_B, rates_D, self.seed, _STRIDE))
        uniform = GumbelNoise(torch.full_like(position_B, self.seed), torch.zeros_like(noise.greedy_B), False)
        key_B = position_B + _STRIDE * draft.tokens_BN[:, 0]
        passes_BD = uniform.accepts(self._rates(P - 1, device), key_B, torch.arange(P - 1, device=device))
        accepted_B = passes_BD.long().cumprod(1).sum(1)
        deepest_B1 = torch.where(tree.acceptable_BN, tree.depth_BN, -1).argmax(1, keepdim=True)
        on_path_BN = tree.mask_BNN.gather(1, deepest_B1[..., None].expand(-1, -1, tree.nodes))[:, 0]
        on_path_BN = on_path_BN & (tree.depth_BN <= accepted_B[:, None])
        order_BN = torch.arange(tree.nodes, device=device).expand(B, -1)
        empty_BP = torch.full((B, P + 1), -1, device=device)
        path_BP = empty_BP.scatter(1, torch.where(on_path_BN, tree.depth_BN, P), order_BN)[:, :P]
        length_B = on_path_BN.sum(1)
        tokens_BP = torch.where(path_BP >= 0, draft.tokens_BN.gather(1, path_BP.clamp(min=0)), 0)
        return Verdict(path_BP, tokens_BP, length_B, real.bonus_B, real.has_nan_B)
