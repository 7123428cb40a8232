"""Packed attention by torch's flash kernels, for GPUs: exact gradients, and nothing is compiled.

Documents are laid out as [documents, longest]: causal flash attention over them, to which the later steps' keys of a row
are joined by the logarithm of the softmax's denominator. The backward hands flash's own backward the output and the
denominator of the whole softmax, as torch's ring attention does for its pieces. That gives the exact gradients
of the first pass's share. The gradients of the later keys are elementwise.

A CPU has twins of these kernels, by which the tests compare them with eyas' own code.
Letters: as in `eyas_train.packed`; R documents, T tokens of the longest, X tokens or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class PaddedRows:
    """The place of each token and each query row in documents that are padded to the longest, [R x T]."""

    place_N: Tensor
    place_M: Tensor
    shape: tuple[int, int]  # R, T

    @classmethod
    def of(cls, lengths: tuple[int, ...], rows_M: Tensor) -> PaddedRows:
        """Return the places of packed rows of these lengths in padded ones."""
        T, lengths_R = max(lengths), torch.tensor(lengths)
        begin_R = torch.tensor([0, *accumulate(lengths)][:-1])
        shift_N = (torch.arange(len(lengths)) * T - begin_R).repeat_interleave(lengths_R)
        place_N = (torch.arange(sum(lengths)) + shift_N).to(rows_M.device, non_blocking=True)
        return cls(place_N, place_N[rows_M], (len(lengths), T))

    def spread(self, x_XHh: Tensor, place_X: Tensor, repeats: int = 1) -> Tensor:
        """Return [X, heads, h] as [R, heads x repeats, T, h], zero where no token is."""
        R, T = self.shape
        wide = x_XHh.new_zeros(R * T, *x_XHh.shape[1:]).index_copy_(0, place_X, x_XHh)
        wide = wide if repeats == 1 else wide.repeat_interleave(repeats, 1)
        return wide.view(R, T, *wide.shape[1:]).transpose(1, 2)

    def rows(self, x_RHTh: Tensor) -> Tensor:
        """Return the query rows [M, H, h]."""
        return _flat(x_RHTh)[self.place_M]

    def replaced(self, x_RHTh: Tensor, new_MHh: Tensor) -> Tensor:
        """Return x with other values at the query rows."""
        R, H, T, h = x_RHTh.shape
        flat = _flat(x_RHTh).clone().index_copy_(0, self.place_M, new_MHh.to(x_RHTh.dtype))
        return flat.view(R, T, H, h).transpose(1, 2)


def attention_of(lengths: tuple[int, ...], rows_M: Tensor) -> Callable[..., Tensor]:
    """Return `flash_attention` of these query rows, each token at most once, in documents of these lengths."""
    return partial(flash_attention, rows=PaddedRows.of(lengths, rows_M))


def flash_attention(
    q_MHh: Tensor, key_NKh: Tensor, value_NKh: Tensor, later_IMKh: tuple[Tensor, Tensor], rows: PaddedRows
) -> Tensor:
    """Return the result of `eyas_train.packed.packed_attention`."""
    with torch.autocast(q_MHh.device.type, enabled=False):
        inputs = [x.to(q_MHh.dtype) for x in (key_NKh, value_NKh, *later_IMKh)]
        out: Tensor = _Flash.apply(q_MHh, *inputs, rows)  # type: ignore[no-untyped-call]
        return out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_MHh: Tensor, k_NKh: Tensor, v_NKh: Tensor, lk_IMKh: Tensor, lv_IMKh: Tensor, rows: PaddedRows
    ) -> Tensor:
        groups = q_MHh.shape[1] // k_NKh.shape[1]
        q = rows.spread(q_MHh, rows.place_M)
        k, v = (rows.spread(x, rows.place_N, groups) for x in (k_NKh, v_NKh))
        out, lse, rest = _flash_forward(q, k, v)
        mixed_MHh = rows.rows(out)
        if len(lk_IMKh):
            later_IMH = _later_scores(q_MHh, lk_IMKh)
            first_MH = rows.rows(lse[..., None])[..., 0]
            whole_MH = torch.logaddexp(first_MH, later_IMH.logsumexp(0))
            first_MHh = mixed_MHh.to(whole_MH.dtype) * (first_MH - whole_MH).exp()[..., None]
            later_MHh = ((later_IMH - whole_MH).exp()[..., None] * lv_IMKh.repeat_interleave(groups, 2)).sum(0)
            mixed_MHh = (first_MHh + later_MHh).to(q_MHh.dtype)
            out = rows.replaced(out, mixed_MHh)
            lse = rows.replaced(lse[..., None], whole_MH[..., None])[..., 0].contiguous()
        ctx.rows, ctx.is_tensor = rows, [isinstance(x, Tensor) for x in rest]
        ctx.others = [x for x in rest if not isinstance(x, Tensor)]  # undefined tensors come as None
        ctx.save_for_backward(q, k, v, out, lse, q_MHh, lk_IMKh, lv_IMKh, *(x for x in rest if isinstance(x, Tensor)))
        return mixed_MHh

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MHh: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, q_MHh, lk_IMKh, lv_IMKh, *tensors = ctx.saved_tensors
        rows, saved, others = ctx.rows, iter(tensors), iter(ctx.others)
        rest = [next(saved if is_tensor else others) for is_tensor in ctx.is_tensor]
        (M, H, h), K = q_MHh.shape, lk_IMKh.shape[2]
        grad_MHh = grad_MHh.to(q_MHh.dtype)
        dq, dk, dv = _flash_backward(rows.spread(grad_MHh, rows.place_M), q, k, v, out, lse, rest)
        dq_MHh = rows.rows(dq)
        dk_NKh, dv_NKh = (_flat(x)[rows.place_N].view(-1, K, H // K, h).sum(2) for x in (dk, dv))
        dlk, dlv = torch.zeros_like(lk_IMKh), torch.zeros_like(lv_IMKh)
        if len(lk_IMKh):
            whole_MH = rows.rows(lse[..., None])[..., 0]
            p_IMH = (_later_scores(q_MHh, lk_IMKh) - whole_MH).exp()
            wide_MHh = grad_MHh.to(p_IMH.dtype)
            delta_MH = (wide_MHh * rows.rows(out)).sum(-1)
            dlv = (p_IMH[..., None] * wide_MHh).view(-1, M, K, H // K, h).sum(3).to(lv_IMKh.dtype)
            dp_IMH = (wide_MHh * lv_IMKh.repeat_interleave(H // K, 2)).sum(-1)
            ds_IMH1 = (p_IMH * (dp_IMH - delta_MH) * h**-0.5).to(q_MHh.dtype)[..., None]
            dlk = (ds_IMH1 * q_MHh).view(-1, M, K, H // K, h).sum(3)
            dq_MHh = dq_MHh + (ds_IMH1 * lk_IMKh.repeat_interleave(H // K, 2)).sum(0)
        return dq_MHh, dk_NKh, dv_NKh, dlk, dlv, None


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """Return causal attention [R, H, T, h], its log-denominators [R, H, T], and further inputs of the backward."""
    if not q.is_cuda:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse, []
    out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out, lse, rest


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: list[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor]
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    return found


def _flat(x_RHTh: Tensor) -> Tensor:
    return x_RHTh.transpose(1, 2).flatten(0, 1)


def _later_scores(q_MHh: Tensor, lk_IMKh: Tensor) -> Tensor:
    """Return the scaled scores [I, M, H] of each row with its own keys of the later steps, in at least float32."""
    groups, wide = q_MHh.shape[1] // lk_IMKh.shape[2], torch.promote_types(q_MHh.dtype, torch.float32)
    scores: Tensor = (q_MHh.to(wide) * lk_IMKh.repeat_interleave(groups, 2).to(wide)).sum(-1) * q_MHh.shape[2] ** -0.5
    return scores
