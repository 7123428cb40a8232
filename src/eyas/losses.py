"""What draft heads are trained to minimise.

Two terms, both summed over the positions of a mask and divided by a normaliser that the caller gives (EAGLE, section 3.2):

    smooth_l1                 the predicted feature should be the target's feature
    soft_cross_entropy        the law that the head of the model makes of it should be the target's law

`soft_cross_entropy` takes logits; `soft_cross_entropy_of` takes features and a frozen head, so that logits of a whole batch never exist:
it finds the gradient of each chunk of positions together with its value and keeps that alone, [.., D] instead of [.., V].
Both touch only the positions of the mask. Values and gradients are those of the plain formula.

This module knows no model and no method. What stands on the right-hand side (`true_*`) is a constant: it gets no gradient.
Letters: R sequences, T tokens, D hidden, V vocabulary, M positions in the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["smooth_l1", "soft_cross_entropy", "soft_cross_entropy_of"]

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


def _rows_in(elements: int, vocab_size: int) -> int:
    return max(1, elements // vocab_size)


def _at_least_float32(values: Tensor) -> Tensor:
    """Half precision is summed in float32; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
