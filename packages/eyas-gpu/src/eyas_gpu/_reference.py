"""The GPU kernels' results in torch: tests compare the kernels with them, and they run in the kernels' place on
a CPU.

Attention is split over the keys, as in the kernels: one token has few queries, and without a split
most of a GPU waits. Each part has its own softmax; `attention_combine` weighs the parts by their
shares of the whole denominator:

    keys     0 ........... length . T nodes        part s:  out_s = softmax(scores_s) values_s,  lse_s = log2 sum 2^scores_s
             |-- part 0 --|-- part 1 --|           whole:   sum of out_s 2^(lse_s - lse),        lse = log2 sum 2^lse_s

Letters: R rows, Q new nodes, T nodes in slots after the committed ones, the new ones last, H
heads, K key-value heads, h head size, S parts, W slots, D hidden, I width of the MLP.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "add_norm", "attention_combine", "attention_parts", "join_norms", "quantise", "rms_norm", "rotate_and_store", "swiglu",
]  # fmt: skip

LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def attention_parts(
    q_RQHh: Tensor, key_RKWh: Tensor, value_RKWh: Tensor, length_R: Tensor, visible_RQT: Tensor, position_RQ: Tensor,
    scale: float, window: int, splits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over each part of the keys: float32 [S, R, Q, H, h], and the log2 of the
    denominators [S, R, Q, H].

    A query sees the committed slots (with a window: slots whose position, which is the slot, is less than
    `window` before its own). Of the nodes after them it sees the visible ones.

    Args:
        length_R: int64; committed slots of each row.
        visible_RQT: bool.
        position_RQ: int64; positions of the queries, read with a window only.
        window: 0: none.
    """
    q_RQHh, key_RKWh, value_RKWh = (x.float() for x in (q_RQHh, key_RKWh, value_RKWh))
    (R, Q, H, h), (K, W), T = q_RQHh.shape, key_RKWh.shape[1:3], visible_RQT.shape[2]
    slot_W = torch.arange(W, device=q_RQHh.device)
    node_RW = slot_W - length_R[:, None]
    allowed_RQW = (node_RW < 0)[:, None].expand(R, Q, W)
    if window:
        near_RQW = position_RQ[..., None] - slot_W < window
        allowed_RQW = allowed_RQW & near_RQW
    is_node_RW = (node_RW >= 0) & (node_RW < T)
    seen_RQW = visible_RQT.gather(2, node_RW.clamp(0, T - 1)[:, None].expand(R, Q, W))
    allowed_RQW = allowed_RQW | (is_node_RW[:, None] & seen_RQW)
    q_RKGQh = q_RQHh.transpose(1, 2).reshape(R, K, H // K, Q, h)
    scores_RKGQW = torch.einsum("rkgqh,rkwh->rkgqw", q_RKGQh, key_RKWh) * (scale / math.log(2))
    scores_RKGQW = scores_RKGQW.masked_fill(~allowed_RQW[:, None, None], -math.inf)
    share_R = (length_R + T + splits - 1) // splits
    out, lse = [], []
    for part in range(splits):
        inside_RW = (slot_W >= part * share_R[:, None]) & (slot_W < (part + 1) * share_R[:, None])
        part_scores = scores_RKGQW.masked_fill(~inside_RW[:, None, None, None], -math.inf)
        top = part_scores.amax(-1, keepdim=True)
        weight = torch.exp2(part_scores - top.masked_fill(top == -math.inf, 0.0))
        total = weight.sum(-1, keepdim=True)
        mixed = torch.einsum("rkgqw,rkwh->rkgqh", weight / total.masked_fill(total == 0, 1.0), value_RKWh)
        out.append(mixed.reshape(R, H, Q, h).transpose(1, 2))
        lse.append((top + total.log2()).reshape(R, H, Q).transpose(1, 2))
    return torch.stack(out), torch.stack(lse)


def attention_combine(parts_SRQHh: Tensor, lse_SRQH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole attention [R, Q, H, h] from its parts."""
    top_RQH = lse_SRQH.amax(0)
    share_SRQH = torch.exp2(lse_SRQH - top_RQH.masked_fill(top_RQH == -math.inf, 0.0))
    total_RQH = share_SRQH.sum(0)
    share_SRQH = share_SRQH / total_RQH.masked_fill(total_RQH == 0, 1.0)
    return (parts_SRQHh * share_SRQH[..., None]).sum(0).to(dtype)


def add_norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its RMS norm; the mean is taken in float32 from the rounded sum, as
    transformers' layers do."""
    summed = x.clone() if residual is None else x + residual
    return summed, rms_norm(summed, weight_D, eps)


def rms_norm(x: Tensor, weight_h: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded to its dtype, times the weight."""
    wide = x.float()
    return weight_h * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def join_norms(a: Tensor, b: Tensor, weight_a: Tensor, weight_b: Tensor, eps: float) -> Tensor:
    """Return the norms of a and b, side by side [..., 2 D]."""
    return torch.cat([rms_norm(a, weight_a, eps), rms_norm(b, weight_b, eps)], dim=-1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as e4m3 [M, I], and its scale in each row, float32 [M, 1]: x = rounded * scale."""
    x_MI = x.reshape(-1, x.shape[-1]).float()
    scale_M1 = (x_MI.abs().amax(1, keepdim=True) / LARGEST_E4M3).clamp(min=1e-12)
    return (x_MI / scale_M1).to(torch.float8_e4m3fn), scale_M1


def rotate_and_store(
    q_RQX: Tensor, k_RQY: Tensor, v_RQY: Tensor, cosine_Ph: Tensor, sine_Ph: Tensor, position_RQ: Tensor, length_R: Tensor,
    first: int, key_RKWh: Tensor, value_RKWh: Tensor, q_norm_h: Tensor | None, k_norm_h: Tensor | None, eps: float,
    unrotated_RKWh: Tensor | None,
) -> Tensor:  # fmt: skip
    """Rotate queries and keys; store keys and values in the slots `length_R + first` and those
    after.

    Args:
        q_RQX, k_RQY, v_RQY: heads side by side.
        cosine_Ph, sine_Ph: [positions, h / 2].
        q_norm_h, k_norm_h: weights of RMS norms of the heads, applied before the rotation.
        unrotated_RKWh: keys are also stored here, as they are before the rotation.

    Returns:
        rotated queries [R, Q, H, h].
    """
    h, (R, Q) = key_RKWh.shape[-1], position_RQ.shape
    q_RQHh, k_RQKh, v_RQKh = (x.reshape(R, Q, -1, h) for x in (q_RQX, k_RQY, v_RQY))
    if q_norm_h is not None:
        q_RQHh = rms_norm(q_RQHh, q_norm_h, eps)
    if k_norm_h is not None:
        k_RQKh = rms_norm(k_RQKh, k_norm_h, eps)
    row_R1 = torch.arange(R, device=length_R.device)[:, None]
    slot_RQ = length_R[:, None] + torch.arange(first, first + Q, device=length_R.device)
    if unrotated_RKWh is not None:
        unrotated_RKWh[row_R1, :, slot_RQ] = k_RQKh
    cosine, sine = (table[position_RQ][:, :, None].float() for table in (cosine_Ph, sine_Ph))
    key_RKWh[row_R1, :, slot_RQ] = _rotate(k_RQKh, cosine, sine)
    value_RKWh[row_R1, :, slot_RQ] = v_RQKh
    return _rotate(q_RQHh, cosine, sine)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, each rounded to the dtype, as in transformers' MLPs."""
    return F.silu(gate) * up
