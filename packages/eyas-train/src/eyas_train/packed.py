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

This module knows no net.
Letters: N tokens, M query rows, H heads, K key-value heads, g query heads per key-value head, h
head size, I later steps, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eyas.nn import Attention, KeysValues
from eyas_train.flash import attention_of

BLOCK = 128  # query rows at a time


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
