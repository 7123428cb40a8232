"""Attention for training: documents end to end without padding, and the diagonals of the
training-time test.

A batch is one packed sequence of N tokens, document after document; a token attends to itself and
the earlier tokens of its document. At step i of the training-time test (EAGLE-3, section 3.2) token
t also attends to the later steps' keys at its own index:

    step 0 keys, causal         k0[begin of document] .. k0[t]
    step 1..i keys, diagonal    k1[t] .. ki[t]                        one softmax over both

Only the tokens whose loss counts are queries ("query rows"); the others cost keys and values only.
Scores exist for one block of queries at a time, in the forward and, recomputed, in the backward, so
memory grows with N and never with N x N.

On GPUs torch's flash kernels compute it in half precision, with exact gradients, and nothing is compiled. Documents are
laid out as [documents, longest]: causal flash attention over them, to which the later steps' keys of a row are joined by
the logarithm of the softmax's denominator. The backward hands flash's own backward the output and the denominator of the
whole softmax, as torch's ring attention does for its pieces. That gives the exact gradients of the first pass's share. The
gradients of the later keys are elementwise. A CPU has twins of these kernels, by which the tests compare them with eyas'
own code.

This module knows no net.
Letters: N tokens, M query rows, H heads, K key-value heads, g query heads per key-value head, h
head size, I later steps, b rows of a block; R documents, T tokens of the longest, X tokens or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eyas.nn import Attention, KeysValues

BLOCK = 128  # query rows at a time

aten = torch.ops.aten


@dataclass(frozen=True)
class QueryRows:
    """The query rows of a packed sequence; the same for all steps."""

    rows_M: Tensor
    lengths: tuple[int, ...]  # of the documents

    @cached_property
    def blocks(self) -> tuple[tuple[int, int, int, int], ...]:
        """Blocks of queries within one document each: (first query, end, first key, end)."""
        blocks, first, bound = [], 0, 0
        rows = self.rows_M.tolist()
        for length in self.lengths:
            begin, bound = bound, bound + length
            while first < len(rows) and rows[first] < bound:
                last = first
                while last < len(rows) and rows[last] < bound and last - first < BLOCK:
                    last += 1
                blocks.append((first, last, begin, rows[last - 1] + 1))
                first = last
        return tuple(blocks)

    @cached_property
    def flash(self) -> Callable[..., Tensor] | None:
        """Attention of these rows by torch's flash kernels; None where a token is several queries, as in the training of
        block heads."""
        return None if bool((self.rows_M.diff() == 0).any()) else attention_of(self.lengths, self.rows_M)


def packed_attention(
    q_MHh: Tensor,
    key_NKh: Tensor,
    value_NKh: Tensor,
    queries: QueryRows,
    later_IMKh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the attention [M, H, h] of the query rows, causal within documents, and to the keys of later steps at the
    same row.

    On CUDA torch's flash kernels compute it in half precision; else `_Packed` does.

    Args:
        q_MHh, key_NKh, value_NKh: rotated; H is a multiple of K.
        later_IMKh: keys and values of the steps 1..I at the query rows.
    """
    if later_IMKh is None:
        empty = q_MHh.new_zeros(0, q_MHh.shape[0], *key_NKh.shape[1:])
        later_IMKh = (empty, empty)
    if q_MHh.is_cuda and q_MHh.dtype in (torch.float16, torch.bfloat16) and queries.flash is not None:
        return queries.flash(q_MHh, key_NKh, value_NKh, later_IMKh)
    out: Tensor = _Packed.apply(q_MHh, key_NKh, value_NKh, *later_IMKh, queries.rows_M, queries.blocks)  # type: ignore[no-untyped-call]
    return out


def attend_packed(
    attention: Attention,
    x_MD: Tensor,
    position_M: Tensor,
    queries: QueryRows,
    keys: KeysValues,
    later: Sequence[KeysValues] = (),
) -> Tensor:
    """Attend from the query rows to a packed sequence's keys, and to the keys of later steps at the same rows."""
    pair = (torch.stack([k for k, _ in later]), torch.stack([v for _, v in later])) if later else None
    out_MHh = packed_attention(attention.query(x_MD, position_M), *keys, queries, pair)
    return attention.o(out_MHh.flatten(1))  # type: ignore[no-any-return]


def _scores(q_MHh: Tensor, key_NKh: Tensor, rows_M: Tensor, block: tuple[int, int, int, int]) -> Tensor:
    """Return the scaled scores [K, g, b, n] of a block, in at least float32; -inf for later keys."""
    first, last, begin, end = block
    q_KgbHh, keys_Knh = _group(q_MHh[first:last], key_NKh.shape[1]), key_NKh[begin:end].transpose(0, 1)
    K, g, b, h = q_KgbHh.shape
    raw_KXn = torch.bmm(q_KgbHh.reshape(K, g * b, h), keys_Knh.transpose(1, 2))
    scores: Tensor = raw_KXn.to(torch.promote_types(raw_KXn.dtype, torch.float32)).view(K, g, b, -1) * h**-0.5
    ahead_bn = torch.arange(begin, end, device=rows_M.device) > rows_M[first:last, None]
    scores.masked_fill_(ahead_bn, -torch.inf)
    return scores


def _group(x_bHh: Tensor, groups: int) -> Tensor:
    """Return [b, H, h] as [K, g, b, h]: query heads by their key-value head."""
    b, H, h = x_bHh.shape
    return x_bHh.view(b, groups, H // groups, h).permute(1, 2, 0, 3)


def _flat(x_Kgbh: Tensor) -> Tensor:
    K, g, b, h = x_Kgbh.shape
    return x_Kgbh.permute(2, 0, 1, 3).reshape(b, K * g, h)


class _Packed(torch.autograd.Function):
    """The gradient is computed from the output and the log of the softmax's denominator (Dao et al.
    2022, algorithm 4)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_MHh: Tensor,
        k_NKh: Tensor,
        v_NKh: Tensor,
        lk_IMKh: Tensor,
        lv_IMKh: Tensor,
        rows_M: Tensor,
        blocks: tuple[Any, ...],
    ) -> Tensor:
        M, H, h = q_MHh.shape
        K, dtype = k_NKh.shape[1], torch.promote_types(q_MHh.dtype, torch.float32)
        later_IMKg = _later_scores(q_MHh, lk_IMKh)
        later_lse_MKg = q_MHh.new_full((M, K, H // K), -torch.inf, dtype=dtype)
        if len(later_IMKg):
            later_lse_MKg = torch.logsumexp(later_IMKg, 0)
        out_MHh, lse_MKg = torch.empty_like(q_MHh), torch.empty_like(later_lse_MKg)
        for block in blocks:
            first, last, begin, end = block
            scores = _scores(q_MHh, k_NKh, rows_M, block)  # [K, g, b, n]
            lse = torch.logaddexp(scores.logsumexp(-1), later_lse_MKg[first:last].permute(1, 2, 0))  # [K, g, b]
            lse_MKg[first:last] = lse.permute(2, 0, 1)
            p = scores.sub_(lse[..., None]).exp_().to(v_NKh.dtype)
            mixed = torch.bmm(p.flatten(1, 2), v_NKh[begin:end].transpose(0, 1)).view(K, H // K, last - first, h)
            out_MHh[first:last] = _flat(mixed)
        if len(later_IMKg):
            share_IMKg = (later_IMKg - lse_MKg).exp_()
            out_MHh += (share_IMKg[..., None] * lv_IMKh[:, :, :, None]).sum(0).view(M, H, h).to(out_MHh.dtype)
        ctx.save_for_backward(q_MHh, k_NKh, v_NKh, lk_IMKh, lv_IMKh, rows_M, out_MHh, lse_MKg)
        ctx.blocks = blocks
        return out_MHh

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MHh: Tensor) -> tuple[Tensor | None, ...]:
        q_MHh, k_NKh, v_NKh, lk_IMKh, lv_IMKh, rows_M, out_MHh, lse_MKg = ctx.saved_tensors
        (M, H, h), K = q_MHh.shape, k_NKh.shape[1]
        grad_MHh, scale = grad_MHh.to(q_MHh.dtype), h**-0.5
        delta_MKg = (grad_MHh * out_MHh).to(lse_MKg.dtype).sum(-1).view(M, K, H // K)
        dq = torch.zeros_like(q_MHh)
        dk, dv = (torch.zeros(x.shape, dtype=lse_MKg.dtype, device=x.device) for x in (k_NKh, v_NKh))
        for block in ctx.blocks:
            first, last, begin, end = block
            scores = _scores(q_MHh, k_NKh, rows_M, block)
            p = scores.sub_(lse_MKg[first:last].permute(1, 2, 0)[..., None]).exp_().flatten(1, 2)
            q_KXh, grad_KXh = (_group(x[first:last], K).flatten(1, 2) for x in (q_MHh, grad_MHh))
            dv[begin:end] += torch.bmm(p.to(v_NKh.dtype).transpose(1, 2), grad_KXh).transpose(0, 1)
            dp = torch.bmm(grad_KXh, v_NKh[begin:end].permute(1, 2, 0)).to(p.dtype)
            delta_KX1 = delta_MKg[first:last].permute(1, 2, 0).flatten(1)[..., None]
            ds = p.mul_(dp.sub_(delta_KX1)).mul_(scale).to(q_MHh.dtype)
            dk[begin:end] += torch.bmm(ds.transpose(1, 2), q_KXh).transpose(0, 1)
            dq[first:last] = _flat(torch.bmm(ds, k_NKh[begin:end].transpose(0, 1)).view(K, H // K, last - first, h))
        dlk, dlv = torch.zeros_like(lk_IMKh), torch.zeros_like(lv_IMKh)
        if len(lk_IMKh):
            grad_MKgh, q_MKgh = grad_MHh.view(M, K, H // K, h), q_MHh.view(M, K, H // K, h)
            p_IMKg = (_later_scores(q_MHh, lk_IMKh) - lse_MKg).exp_()
            dlv = (p_IMKg[..., None] * grad_MKgh).sum(3).to(lv_IMKh.dtype)
            dp_IMKg = (grad_MKgh * lv_IMKh[:, :, :, None]).to(p_IMKg.dtype).sum(-1)
            ds_IMKg1 = (p_IMKg * (dp_IMKg - delta_MKg) * scale).to(q_MHh.dtype)[..., None]
            dlk = (ds_IMKg1 * q_MKgh).sum(3)
            dq += (ds_IMKg1 * lk_IMKh[:, :, :, None]).sum(0).view(M, H, h)
        return dq, dk.to(k_NKh.dtype), dv.to(v_NKh.dtype), dlk, dlv, None, None


def _later_scores(q_MHh: Tensor, lk_IMKh: Tensor) -> Tensor:
    """Return the scaled scores [I, M, K, g] of each row with its own keys of the later steps, in at least float32."""
    M, H, h = q_MHh.shape
    K = lk_IMKh.shape[2]
    product = q_MHh.view(M, K, H // K, h) * lk_IMKh[:, :, :, None]
    scores: Tensor = product.to(torch.promote_types(q_MHh.dtype, torch.float32)).sum(-1) * h**-0.5
    return scores


# --- flash kernels


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
        return _flat_rows(x_RHTh)[self.place_M]

    def replaced(self, x_RHTh: Tensor, new_MHh: Tensor) -> Tensor:
        """Return x with other values at the query rows."""
        R, H, T, h = x_RHTh.shape
        flat = _flat_rows(x_RHTh).clone().index_copy_(0, self.place_M, new_MHh.to(x_RHTh.dtype))
        return flat.view(R, T, H, h).transpose(1, 2)


def attention_of(lengths: tuple[int, ...], rows_M: Tensor) -> Callable[..., Tensor]:
    """Return `flash_attention` of these query rows, each token at most once, in documents of these lengths."""
    return partial(flash_attention, rows=PaddedRows.of(lengths, rows_M))


def flash_attention(
    q_MHh: Tensor, key_NKh: Tensor, value_NKh: Tensor, later_IMKh: tuple[Tensor, Tensor], rows: PaddedRows
) -> Tensor:
    """Return the result of `packed_attention`."""
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
            later_IMH = _scores_of_heads(q_MHh, lk_IMKh)
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
        dk_NKh, dv_NKh = (_flat_rows(x)[rows.place_N].view(-1, K, H // K, h).sum(2) for x in (dk, dv))
        dlk, dlv = torch.zeros_like(lk_IMKh), torch.zeros_like(lv_IMKh)
        if len(lk_IMKh):
            whole_MH = rows.rows(lse[..., None])[..., 0]
            p_IMH = (_scores_of_heads(q_MHh, lk_IMKh) - whole_MH).exp()
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


def _flat_rows(x_RHTh: Tensor) -> Tensor:
    return x_RHTh.transpose(1, 2).flatten(0, 1)


def _scores_of_heads(q_MHh: Tensor, lk_IMKh: Tensor) -> Tensor:
    """Return the scaled scores [I, M, H] of each row with its own keys of the later steps, in at least float32."""
    groups, wide = q_MHh.shape[1] // lk_IMKh.shape[2], torch.promote_types(q_MHh.dtype, torch.float32)
    scores: Tensor = (q_MHh.to(wide) * lk_IMKh.repeat_interleave(groups, 2).to(wide)).sum(-1) * q_MHh.shape[2] ** -0.5
    return scores
