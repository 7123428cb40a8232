"""What draft heads are trained to minimise.

Two terms, both summed over the positions of a mask and divided by a normaliser that the caller gives (EAGLE, section 3.2):

    smooth_l1                 the predicted feature should be the target's feature
    soft_cross_entropy        the law that the head of the model makes of it should be the target's law

`soft_cross_entropy` takes logits; `soft_cross_entropy_of` takes features and a frozen head, so that logits of a whole batch never exist:
it finds the gradient of each chunk of positions together with its value and keeps that alone, [.., D] instead of [.., V].
Both touch only the positions of the mask. `draft_cross_entropy` is the same for a head that is trained itself, over a draft vocabulary,
where several steps of the training-time test are compared with one answer (EAGLE-3). Values and gradients are those of the plain formula.

This module knows no model and no method. What stands on the right-hand side (`true_*`) is a constant: it gets no gradient.
Letters: R sequences, T tokens, D hidden, V vocabulary, M positions in the mask, K guesses, U answers, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Guesses", "draft_cross_entropy", "smooth_l1", "soft_cross_entropy", "soft_cross_entropy_of", "weighted_smooth_l1"]

CHUNK_ELEMENTS = 1 << 24  # logits held at a time: 64 MiB in float32


def smooth_l1(predicted_RTD: Tensor, true_RTD: Tensor, mask_RT: Tensor, normaliser: Tensor | float) -> Tensor:
    """Smooth L1 with beta 1: the mean over D, summed over the mask, divided by `normaliser`; a scalar in at least float32.

    Args:
        mask_RT: bool or 0/1; which positions count.
        normaliser: what the sum is divided by: the number of counted positions for a mean.
    """
    mask_RT = mask_RT.bool()
    predicted_MD, true_MD = _at_least_float32(predicted_RTD[mask_RT]), _at_least_float32(true_RTD[mask_RT].detach())
    return F.smooth_l1_loss(predicted_MD, true_MD, reduction="none").mean(-1).sum() / normaliser


def weighted_smooth_l1(predicted_KD: Tensor, true_KD: Tensor, weight_K: Tensor) -> Tensor:
    """Smooth L1 with beta 1: the mean over D, times each row's weight, summed."""
    each_KD = F.smooth_l1_loss(_at_least_float32(predicted_KD), _at_least_float32(true_KD.detach()), reduction="none")
    return (each_KD.mean(-1) * weight_K).sum()


def soft_cross_entropy(
    predicted_logits_RTV: Tensor,
    true_logits_RTV: Tensor,
    mask_RT: Tensor,
    normaliser: Tensor | float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Cross-entropy from softmax(true logits) to softmax(predicted logits), summed over the mask, divided by `normaliser`; a scalar.

    Args:
        mask_RT: bool or 0/1; which positions count.
        normaliser: what the sum is divided by.
        chunk_elements: logits that are worked on at a time; bounds the memory beside the arguments and the gradient.
    """
    rows_M = mask_RT.bool().flatten().nonzero()[:, 0]
    predicted_NV, true_NV = predicted_logits_RTV.flatten(0, -2), true_logits_RTV.detach().flatten(0, -2)
    total: Tensor = _SoftCrossEntropy.apply(predicted_NV, true_NV, rows_M, _rows_in(chunk_elements, predicted_NV.shape[-1]))  # type: ignore[no-untyped-call]
    return total / normaliser


def soft_cross_entropy_of(
    head: Callable[[Tensor], Tensor],
    predicted_RTD: Tensor,
    true_RTD: Tensor,
    mask_RT: Tensor,
    normaliser: Tensor | float,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """`soft_cross_entropy(head(predicted), head(true), mask, normaliser)` without ever holding those logits, and how often they agree.

    Args:
        head: features [..., D] -> logits [..., V]; frozen: it gets no gradient. Called once for each chunk of rows.
        mask_RT: bool or 0/1; which positions count.
        normaliser: what the sum is divided by.
        vocab_size: V.
        chunk_elements: logits that are worked on at a time; bounds the memory.

    Returns:
        The loss (a scalar), and the number of positions of the mask (int64 scalar) where both logits have the same argmax.
    """
    mask_RT = mask_RT.bool()
    predicted_MD, true_MD, count = predicted_RTD[mask_RT], true_RTD[mask_RT].detach(), _rows_in(chunk_elements, vocab_size)
    wanted = torch.is_grad_enabled() and predicted_MD.requires_grad
    total, agreeing = _ThroughHead.apply(predicted_MD, true_MD, head, count, wanted)  # type: ignore[no-untyped-call]
    return total / normaliser, agreeing


@dataclass(frozen=True)
class Guesses:
    """What `draft_cross_entropy` found, guess by guess; nothing of it has a gradient but the total."""

    total: Tensor  # scalar: the weighted sum
    each_K: Tensor  # cross-entropy; 0 where the guess does not count
    right_K: Tensor  # bool: the draft's best token is the target's
    counts_K: Tensor  # bool: the target's best token is in the draft vocabulary


def draft_cross_entropy(
    hidden_KD: Tensor,
    head_vD: Tensor,
    answer_K: Tensor,
    weight_K: Tensor,
    answers: int,
    teacher: Callable[[slice], Tensor],
    draft_ids_v: Tensor | None = None,
    chunk_elements: int | None = None,
) -> Guesses:
    """Cross-entropy over the draft vocabulary between what a trained head makes of hidden states and the target's law (EAGLE-3).

    The target's law is restricted to the draft vocabulary and renormalised; where its best token is not in there, the guess does not count.
    Logits exist for one chunk of answers at a time, and every answer's are worked out once, however many guesses are compared with it.

    Args:
        hidden_KD: normed hidden states of the guesses.
        head_vD: the draft head's weight; gets a gradient.
        answer_K: int64; which answer each guess is compared with.
        weight_K: what each guess weighs in the total.
        answers: U.
        teacher: a slice of the answers -> the target's logits [C, V]; frozen.
        draft_ids_v: int64; the target's ids of the draft vocabulary; None: the two are the same.
        chunk_elements: draft logits held at a time.
    """
    elements = chunk_elements or (1 << 20 if hidden_KD.device.type == "cpu" else 1 << 26)  # a CPU's cache; a GPU's launches
    per_answer = max(1, -(-hidden_KD.shape[0] // max(1, answers))) * head_vD.shape[0]
    wanted = torch.is_grad_enabled() and (hidden_KD.requires_grad or head_vD.requires_grad)
    found = _ThroughDraftHead.apply(  # type: ignore[no-untyped-call]
        hidden_KD, head_vD, answer_K, weight_K, answers, teacher, draft_ids_v, _rows_in(elements, per_answer), wanted
    )
    return Guesses(*found)


def _rows(predicted_CV: Tensor, true_CV: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of some rows, and its gradient to the predicted logits: softmax(predicted) - softmax(true)."""
    p_CV, log_q_CV = _at_least_float32(true_CV).softmax(-1), _at_least_float32(predicted_CV).log_softmax(-1)
    return -(p_CV * log_q_CV).sum(), log_q_CV.exp_().sub_(p_CV)


class _SoftCrossEntropy(torch.autograd.Function):
    """The sum over the given rows; the backward works the rows out again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, predicted_NV: Tensor, true_NV: Tensor, rows_M: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(predicted_NV, true_NV, rows_M)
        ctx.count = count
        total = _at_least_float32(predicted_NV[:0]).sum()
        for rows_C in torch.split(rows_M, count):
            total = total + _rows(predicted_NV[rows_C], true_NV[rows_C])[0]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        predicted_NV, true_NV, rows_M = ctx.saved_tensors
        gradient_NV = torch.zeros_like(predicted_NV)
        for rows_C in torch.split(rows_M, ctx.count):
            gradient_NV[rows_C] = _rows(predicted_NV[rows_C], true_NV[rows_C])[1].mul_(outer).to(gradient_NV.dtype)
        return gradient_NV, None, None, None


class _ThroughHead(torch.autograd.Function):
    """The sum over all rows of what a head makes of them, with the gradient to the features found on the way."""

    @staticmethod
    def forward(
        ctx: Any, predicted_MD: Tensor, true_MD: Tensor, head: Callable[[Tensor], Tensor], count: int, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        total, agreeing = _at_least_float32(predicted_MD[:0]).sum(), torch.zeros((), dtype=torch.long, device=predicted_MD.device)
        gradient_MD = torch.zeros_like(predicted_MD)
        for first in range(0, len(predicted_MD), count):
            chunk = slice(first, first + count)
            true_CV = head(true_MD[chunk])
            with torch.set_grad_enabled(wanted):
                features_CD = predicted_MD[chunk].detach().requires_grad_(wanted)
                predicted_CV = head(features_CD)
            part, difference_CV = _rows(predicted_CV.detach(), true_CV)
            total, agreeing = total + part, agreeing + (predicted_CV.argmax(-1) == true_CV.argmax(-1)).sum()
            if wanted:
                (gradient_MD[chunk],) = torch.autograd.grad(predicted_CV, features_CD, difference_CV.to(predicted_CV.dtype))
        ctx.save_for_backward(gradient_MD)
        ctx.mark_non_differentiable(agreeing)
        return total, agreeing

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD * outer.to(gradient_MD.dtype), None, None, None, None


class _ThroughDraftHead(torch.autograd.Function):
    """The gradients to the hidden states and to the head are found with the value, chunk by chunk of the answers."""

    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Tensor, head_vD: Tensor, answer_K: Tensor, weight_K: Tensor, answers: int,
        teacher: Callable[[slice], Tensor], draft_ids_v: Tensor | None, count: int, wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        order_K = answer_K.argsort(stable=True)
        firsts = torch.arange(0, answers + count, count, device=answer_K.device)
        bounds = torch.searchsorted(answer_K[order_K], firsts).tolist()
        each_K = torch.zeros(len(answer_K), dtype=torch.promote_types(head_vD.dtype, torch.float32), device=hidden_KD.device)
        right_K, counts_K = (torch.zeros(len(answer_K), dtype=torch.bool, device=hidden_KD.device) for _ in range(2))
        grad_hidden, grad_head = torch.zeros_like(hidden_KD), torch.zeros_like(head_vD, dtype=each_K.dtype)
        weight_K = weight_K.to(each_K.dtype)
        for first, low, high in zip(range(0, answers, count), bounds, bounds[1:], strict=False):
            if low == high:
                continue
            rows, true_CV = order_K[low:high], teacher(slice(first, min(answers, first + count)))
            best_C, p_Cv = _restricted(true_CV, draft_ids_v)
            at, hidden_nD = answer_K[rows] - first, hidden_KD[rows]
            logits_nv, p_nv = F.linear(hidden_nD, head_vD), p_Cv[at]
            counts, best = best_C[at] >= 0, best_C[at]
            log_q_nv = _at_least_float32(logits_nv).log_softmax(-1)
            each_K[rows] = (p_nv * log_q_nv).sum(-1).neg_() * counts
            right_K[rows], counts_K[rows] = (logits_nv.argmax(-1) == best) & counts, counts
            if wanted:
                grad_nv = log_q_nv.exp_().sub_(p_nv).mul_((weight_K[rows] * counts)[:, None]).to(logits_nv.dtype)
                grad_hidden[rows] = (grad_nv @ head_vD).to(grad_hidden.dtype)
                grad_head += grad_nv.T @ hidden_nD
        ctx.save_for_backward(grad_hidden, grad_head.to(head_vD.dtype))
        ctx.mark_non_differentiable(each_K, right_K, counts_K)
        return (each_K * weight_K).sum(), each_K, right_K, counts_K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * outer.to(grad_hidden.dtype), grad_head * outer.to(grad_head.dtype), *[None] * 7


def _restricted(true_CV: Tensor, draft_ids_v: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's best token as a draft id (-1: not in the draft vocabulary) [C], and its law over the draft vocabulary [C, v]."""
    best_C = true_CV.argmax(-1)
    if draft_ids_v is None:
        return best_C, _at_least_float32(true_CV).softmax(-1)
    place_C = torch.searchsorted(draft_ids_v, best_C).clamp(max=len(draft_ids_v) - 1)
    known_C = draft_ids_v[place_C] == best_C
    return torch.where(known_C, place_C, -1), _at_least_float32(true_CV[:, draft_ids_v]).softmax(-1)


def _rows_in(elements: int, vocab_size: int) -> int:
    return max(1, elements // vocab_size)


def _at_least_float32(values: Tensor) -> Tensor:
    """Half precision is summed in float32; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
