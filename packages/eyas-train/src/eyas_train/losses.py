"""Loss functions of draft heads.

Two terms, both summed over the positions that count (EAGLE, section 3.2):

    smooth_l1                 between the predicted feature and the target's feature
    soft_cross_entropy        between the distributions that the LM head computes from them

`soft_cross_entropy` takes logits; `soft_cross_entropy_of` takes features and a frozen LM head.
`draft_losses` compares several predictions with one target distribution, as the steps of the training-time test
need it (EAGLE-3, MTP modules). They pass through an LM head that is itself trained and may have a draft
vocabulary, or through a frozen one. It takes any of these objectives of q against p:

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

 Through a head
the logits of a whole batch never exist. The gradient of each chunk of positions is computed together with its
value, and only the gradient is kept, [.., D] instead of [.., V]. Values and gradients equal the plain
formula's.

This module knows no model and no method. The target's side (`true_*`) is a constant: it gets no
gradient.

Shapes: M positions, D hidden size, V vocabulary, C rows of a chunk, K draft predictions, n of them
that are compared with one chunk, U target positions, v draft vocabulary. p is the target's
distribution, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(p over the draft vocabulary [n, v], p's share inside it [n], log q [n, v]) -> loss [n], overlap
[n], and the gradient of each loss with respect to the logits of q [n, v].
"""

CHUNK_ELEMENTS = 1 << 24  # logits in memory at a time: 64 MiB in float32
CACHED_ELEMENTS = 1 << 18  # logits that a CPU treats at a time: 1 MiB in float32


def smooth_l1(predicted_MD: Tensor, true_MD: Tensor, weight_M: Tensor | None = None) -> Tensor:
    """Smooth L1 with beta 1: the mean over D, times each row's weight if there are weights, summed over the
    rows. It is a scalar in float32 or, for features in float64, in float64.
    """
    losses_MD = F.smooth_l1_loss(_at_least_float32(predicted_MD), _at_least_float32(true_MD.detach()), reduction="none")
    losses_M = losses_MD.mean(-1)
    return (losses_M if weight_M is None else losses_M * weight_M).sum()


def soft_cross_entropy(predicted_MV: Tensor, true_MV: Tensor, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Return the cross-entropy of softmax(predicted logits) under softmax(true logits), summed over the rows; a
    scalar.

    Args:
        chunk_elements: logits that are processed at a time; bounds the memory in addition to the
            arguments and the gradient.
    """
    chunk_rows = _rows_in(chunk_elements, predicted_MV.shape[-1])
    total: Tensor = _SoftCrossEntropy.apply(predicted_MV, true_MV.detach(), chunk_rows)  # type: ignore[no-untyped-call]
    return total


def soft_cross_entropy_of(
    head: Callable[[Tensor], Tensor],
    predicted_MD: Tensor,
    true_MD: Tensor,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return `soft_cross_entropy(head(predicted), head(true))`, without all these logits in memory.

    Args:
        head: features [..., D] -> logits [..., V]; frozen: it gets no gradient. Called once for
            each chunk of rows.
        vocab_size: V.
        chunk_elements: logits that are processed at a time; bounds the memory.

    Returns:
        The loss (a scalar), and the number of rows (int64 scalar) where both logits have the same
        argmax.
    """
    true_MD = true_MD.detach()
    every_M = torch.arange(len(true_MD), device=true_MD.device)
    losses = draft_losses(
        predicted_MD,
        FrozenHead(head, vocab_size),
        every_M,
        torch.ones_like(every_M),
        len(every_M),
        lambda positions: head(true_MD[positions]),
        chunk_elements=chunk_elements,
    )
    return losses.total, losses.is_correct_K.sum()


@dataclass(frozen=True)
class FrozenHead:
    """An LM head that gets no gradient."""

    logits: Callable[[Tensor], Tensor]  # hidden states [..., D] -> logits [..., V]
    vocab_size: int


@dataclass(frozen=True)
class DraftLosses:
    """The result of `draft_losses`, for each draft prediction; only the total has a gradient."""

    total: Tensor  # scalar: the weighted sum
    loss_K: Tensor  # the objective; 0 where the prediction does not count
    overlap_K: Tensor  # sum of min(p, q); 0 where the prediction does not count
    is_correct_K: Tensor  # bool: the draft's most likely token is the target's
    is_counted_K: Tensor  # bool: the target's most likely token is in the draft vocabulary


def draft_losses(
    hidden_KD: Tensor,
    head: Tensor | FrozenHead,
    position_K: Tensor,
    weight_K: Tensor,
    positions: int,
    target_logits: Callable[[slice], Tensor],
    draft_ids_v: Tensor | None = None,
    chunk_elements: int | None = None,
    objective: str = "distribution",
) -> DraftLosses:
    """Compare an LM head's distribution over the draft vocabulary with the target's (EAGLE-3, section 3.2).

    Where the target's most likely token is not in the draft vocabulary, the prediction does not
    count. Logits exist for one chunk of positions at a time, and the target's logits of a position
    are computed once, however many predictions are compared with them.

    Args:
        hidden_KD: normed hidden states of the draft.
        head: the weight [v, D] of the draft's LM head, which gets a gradient; or a frozen head.
        position_K: int64; the target position that each prediction is compared with.
        weight_K: weight of each prediction in the total.
        positions: U, the number of target positions.
        target_logits: a slice of the positions -> the target's logits [C, V]; frozen.
        draft_ids_v: int64, the target's ids of the draft vocabulary; None if the two vocabularies are the same.
        chunk_elements: draft logits in memory at a time.
        objective: a name of OBJECTIVES.
    """
    draft_vocab_size = head.vocab_size if isinstance(head, FrozenHead) else len(head)
    elements_per_position = max(1, -(-hidden_KD.shape[0] // max(1, positions))) * draft_vocab_size
    elements = chunk_elements or _default_chunk_elements(hidden_KD.device, elements_per_position)
    needs_grad = torch.is_grad_enabled() and (
        hidden_KD.requires_grad or (isinstance(head, Tensor) and head.requires_grad)
    )
    chunk_rows = _rows_in(elements, elements_per_position)
    results = _LossThroughDraftHead.apply(  # type: ignore[no-untyped-call]
        hidden_KD,
        head,
        position_K,
        weight_K,
        positions,
        target_logits,
        draft_ids_v,
        chunk_rows,
        OBJECTIVES[objective],
        needs_grad,
    )
    return DraftLosses(*results)


def _cross_entropy_and_gradient(predicted_CV: Tensor, true_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of some rows, and its gradient with respect to the predicted logits:
    q - p.
    """
    p_CV = _at_least_float32(true_CV).softmax(-1)
    log_q_CV = _at_least_float32(predicted_CV).log_softmax(-1)
    return -(p_CV * log_q_CV).sum(), log_q_CV.exp_().sub_(p_CV)


class _SoftCrossEntropy(torch.autograd.Function):
    """The sum over the rows; the backward computes them again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, predicted_MV: Tensor, true_MV: Tensor, chunk_rows: int) -> Tensor:
        ctx.save_for_backward(predicted_MV, true_MV)
        ctx.chunk_rows = chunk_rows
        total = _at_least_float32(predicted_MV[:0]).sum()
        for predicted_CV, true_CV in _chunks(chunk_rows, predicted_MV, true_MV):
            total = total + _cross_entropy_and_gradient(predicted_CV, true_CV)[0]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        predicted_MV, true_MV = ctx.saved_tensors
        gradient_MV = torch.empty_like(predicted_MV)
        for gradient_CV, predicted_CV, true_CV in _chunks(ctx.chunk_rows, gradient_MV, predicted_MV, true_MV):
            gradient_CV.copy_(_cross_entropy_and_gradient(predicted_CV, true_CV)[1].mul_(outer))
        return gradient_MV, None, None


class _LossThroughDraftHead(torch.autograd.Function):
    """The forward computes the gradients with respect to hidden states and LM head together with
    the value, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        head: Tensor | FrozenHead,
        position_K: Tensor,
        weight_K: Tensor,
        positions: int,
        target_logits: Callable[[slice], Tensor],
        draft_ids_v: Tensor | None,
        chunk_rows: int,
        objective: Objective,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        order_K = position_K.argsort(stable=True)
        firsts = torch.arange(0, positions + chunk_rows, chunk_rows, device=position_K.device)
        bounds = torch.searchsorted(position_K[order_K], firsts).tolist()
        dtype = torch.promote_types((head if isinstance(head, Tensor) else hidden_KD).dtype, torch.float32)
        loss_K = torch.zeros(len(position_K), dtype=dtype, device=hidden_KD.device)
        overlap_K = torch.zeros_like(loss_K)
        is_correct_K = torch.zeros(len(position_K), dtype=torch.bool, device=hidden_KD.device)
        is_counted_K = torch.zeros_like(is_correct_K)
        grad_hidden_KD = torch.zeros_like(hidden_KD)
        # empty for a frozen head
        grad_head_vD = torch.zeros_like(head if isinstance(head, Tensor) else hidden_KD[:0], dtype=dtype)
        weight_K = weight_K.to(dtype)
        for first, low, high in zip(range(0, positions, chunk_rows), bounds, bounds[1:], strict=False):
            if low == high:
                continue
            rows_n = order_K[low:high]  # the predictions that are compared with this chunk of positions
            true_CV = target_logits(slice(first, min(positions, first + chunk_rows)))
            best_C, p_Cv, share_C = _by_rows(lambda true_bV: _restrict(true_bV, draft_ids_v), true_CV)
            row_n = position_K[rows_n] - first
            hidden_nD, best_n = hidden_KD[rows_n], best_C[row_n]
            if isinstance(head, Tensor):
                logits_nv = F.linear(hidden_nD, head)
            else:
                with torch.set_grad_enabled(needs_grad):
                    graph_nv = head.logits(hidden_nD.requires_grad_(needs_grad))
                logits_nv = graph_nv.detach()
            is_counted_n = best_n >= 0
            loss_n, overlap_n, guess_n, grad_nv = _by_rows(
                partial(_compare, objective, p_Cv, share_C), logits_nv, row_n, weight_K[rows_n] * is_counted_n
            )
            loss_K[rows_n], overlap_K[rows_n] = loss_n * is_counted_n, overlap_n * is_counted_n
            is_correct_K[rows_n] = (guess_n == best_n) & is_counted_n
            is_counted_K[rows_n] = is_counted_n
            if needs_grad:
                if isinstance(head, Tensor):
                    grad_hidden_nD = grad_nv @ head
                    grad_head_vD += grad_nv.T @ hidden_nD.to(grad_nv.dtype)
                else:
                    (grad_hidden_nD,) = torch.autograd.grad(graph_nv, hidden_nD, grad_nv)
                grad_hidden_KD[rows_n] = grad_hidden_nD.to(grad_hidden_KD.dtype)
        ctx.save_for_backward(grad_hidden_KD, grad_head_vD.to((head if isinstance(head, Tensor) else hidden_KD).dtype))
        ctx.mark_non_differentiable(loss_K, overlap_K, is_correct_K, is_counted_K)
        return (loss_K * weight_K).sum(), loss_K, overlap_K, is_correct_K, is_counted_K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_KD, grad_head_vD = ctx.saved_tensors
        grad_head = grad_head_vD * outer.to(grad_head_vD.dtype) if ctx.needs_input_grad[1] else None
        return grad_hidden_KD * outer.to(grad_hidden_KD.dtype), grad_head, *[None] * 8


def _compare(
    objective: Objective, p_Cv: Tensor, share_C: Tensor, logits_nv: Tensor, row_n: Tensor, weight_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss [n], the overlap [n], the draft's most likely token [n], and the gradient of the weighted loss with
    respect to the logits [n, v]. Prediction i is compared with row_n[i] of p."""
    exact_nv = _at_least_float32(logits_nv)
    loss_n, overlap_n, grad_nv = objective(p_Cv[row_n], share_C[row_n], exact_nv.log_softmax(-1))
    return loss_n, overlap_n, _argmax(exact_nv), grad_nv.mul_(weight_n[:, None]).to(logits_nv.dtype)


def _by_rows(function: Callable[..., tuple[Tensor, ...]], logits_nV: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return function(logits, *others), which treats each row alone. A CPU gets few rows at a time, because their numbers
    stay in its cache from one operation to the next: 3 to 5 times as fast."""
    n, V = logits_nV.shape
    rows = _rows_in(CACHED_ELEMENTS, V) if logits_nV.device.type == "cpu" else n
    parts = [function(*part) for part in _chunks(rows, logits_nV, *others)]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _restrict(true_CV: Tensor, draft_ids_v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's most likely token as a draft id [C] (-1: not in the draft vocabulary), and p over the
    draft vocabulary [C, v]. The third value is the share of the target's distribution that is in there [C].
    """
    true_CV = _at_least_float32(true_CV)
    best_C = _argmax(true_CV)
    if draft_ids_v is None:
        return best_C, true_CV.softmax(-1), true_CV.new_ones(len(true_CV))
    draft_id_C = torch.searchsorted(draft_ids_v, best_C).clamp(max=len(draft_ids_v) - 1)
    is_known_C = draft_ids_v[draft_id_C] == best_C
    known_Cv = true_CV[:, draft_ids_v]
    share_C = (known_Cv.logsumexp(-1) - true_CV.logsumexp(-1)).exp()
    return torch.where(is_known_C, draft_id_C, -1), known_Cv.softmax(-1), share_C


def _argmax(values_nV: Tensor) -> Tensor:
    """Return the first index of each row's largest number. On a CPU numpy is ten times as fast as torch."""
    on_cpu = values_nV.device.type == "cpu"
    return torch.from_numpy(values_nV.numpy().argmax(-1)) if on_cpu else values_nV.argmax(-1)


def _default_chunk_elements(device: torch.device, elements_per_position: int) -> int:
    """Return how many draft logits are in memory at a time: few launches on a GPU. On a CPU they fit its cache,
    but are at least 128 positions, because each chunk reads both LM heads (up to 4.5 times faster than chunks
    of 5 positions).
    """
    if device.type != "cpu":
        return 1 << 26
    return min(1 << 25, max(1 << 20, 128 * elements_per_position))


def _rows_in(elements: int, row_elements: int) -> int:
    """Return the rows of a chunk that has at most `elements` elements."""
    return max(1, elements // row_elements)


def _chunks(rows: int, *logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the tensors in chunks of this many rows."""
    return zip(*(torch.split(logits_MV, rows) for logits_MV in logits), strict=True)


def _at_least_float32(values: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# --- objectives


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
    weight_n = (-3.0 * overlap_n).exp()
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
