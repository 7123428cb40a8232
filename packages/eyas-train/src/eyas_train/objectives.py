"""Training objectives of a draft's distribution q against the target's p, with their gradients.

    distribution    the cross-entropy of q under p (EAGLE-3, section 3.2)
    acceptance      -log of the overlap
    hybrid          lambda KL(p, q) + (1 - lambda) (1 - overlap), with lambda = exp(-3 overlap)

The overlap is sum min(p, q), the probability that speculative sampling accepts a token drawn from
q. The last two are LK losses (Samarin et al. 2026, arXiv 2602.23881): they train the overlap itself, which the
distribution's cross-entropy only bounds. The total variation distance, 1 - overlap, has hardly a gradient while
p and q differ. So `acceptance` divides that gradient by the overlap, and `hybrid` begins near KL and ends near
1 - overlap. In the weight lambda the overlap is a constant.

A draft vocabulary has v of the target's V tokens. For cross-entropy and KL the distribution p is restricted to
it and renormalized. For the overlap it is not renormalized, because tokens outside are never accepted.

Shapes: n predictions, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["OBJECTIVES", "Objective"]

ETA = 3.0  # parameter of the hybrid: the paper's best

Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(p over the draft vocabulary [n, v], p's share inside it [n], log q [n, v]) -> loss [n], overlap
[n], and the gradient of each loss with respect to the logits of q [n, v].
"""


def distribution(p_nv: Tensor, share_n: Tensor, log_q_nv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy of q under p."""
    loss_n = (p_nv * log_q_nv).sum(-1).neg_()
    q_nv = log_q_nv.exp()
    return loss_n, _overlap(p_nv, share_n, q_nv), q_nv.sub_(p_nv)


def acceptance(p_nv: Tensor, share_n: Tensor, log_q_nv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minus log of the overlap."""
    q_nv = log_q_nv.exp()
    overlap_n = _overlap(p_nv, share_n, q_nv).clamp_(min=torch.finfo(q_nv.dtype).tiny)
    slope_nv = _overlap_gradient(p_nv, share_n, q_nv)
    return overlap_n.log().neg_(), overlap_n, slope_nv.div_(-overlap_n[:, None])


def hybrid(p_nv: Tensor, share_n: Tensor, log_q_nv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Kullback-Leibler divergence and 1 - overlap, weighted by the overlap."""
    q_nv = log_q_nv.exp()
    overlap_n = _overlap(p_nv, share_n, q_nv)
    weight_n = (-ETA * overlap_n).exp()
    divergence_n = torch.special.xlogy(p_nv, p_nv).sub_(p_nv * log_q_nv).sum(-1)
    loss_n = weight_n * divergence_n + (1 - weight_n) * (1 - overlap_n)
    slope_nv = _overlap_gradient(p_nv, share_n, q_nv)
    return loss_n, overlap_n, q_nv.sub_(p_nv).mul_(weight_n[:, None]).sub_(slope_nv.mul_((1 - weight_n)[:, None]))


def _overlap(p_nv: Tensor, share_n: Tensor, q_nv: Tensor) -> Tensor:
    """Sum of min(p, q) [n]."""
    return torch.minimum(p_nv * share_n[:, None], q_nv).sum(-1)


def _overlap_gradient(p_nv: Tensor, share_n: Tensor, q_nv: Tensor) -> Tensor:
    """Return the gradient of the overlap with respect to the logits of q [n, v]: only tokens with q below p
    can raise it.
    """
    rising_nv = q_nv * (q_nv < p_nv * share_n[:, None])
    return rising_nv.sub_(q_nv * rising_nv.sum(-1, keepdim=True))


OBJECTIVES: Mapping[str, Objective] = {"distribution": distribution, "acceptance": acceptance, "hybrid": hybrid}
