"""Operators whose sums have the order of plain decoding, so that a token's bits do not depend on the shape of a pass: by
Triton on CUDA, in torch on a CPU.

Fast kernels choose tiles, split inputs (split-K) and keys (split-KV) by the number of tokens, and a node of a tree finds
its ancestors in other slots than plain decoding does. Here one configuration serves all numbers of tokens, and keys are
read by *position*: the key of position p is at place p of its sum, in whatever slot it lies. Parts of the keys begin at
multiples of PART_KEYS, and are added up one after the other.

The torch versions give these numbers with torch's own orders. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.gpu import _ops
from eyas.gpu._ops import operator

__all__ = ["fixed_attention", "fixed_product", "paths"]

PART_KEYS = 512  # positions of a part


def paths(visible_RQT: Tensor, depth_RT: Tensor) -> Tensor:
    """Return which of the T nodes is the ancestor at each depth, or the node itself: int64 [R, Q, T], -1 below it."""
    R, Q, T = visible_RQT.shape
    depth_RQT = torch.where(visible_RQT, depth_RT[:, None], T)
    node_RQT = torch.arange(T, device=depth_RT.device).expand(R, Q, T)
    return torch.full((R, Q, T + 1), -1, device=depth_RT.device).scatter(2, depth_RQT, node_RQT)[..., :T].contiguous()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    _ops.kernels("order").product(x.reshape(-1, x.shape[-1]), weight, bias, out.view(-1, out.shape[-1]))


@operator(_product, F.linear)
def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., I] times the weights [O, I], plus the bias [O]."""
    return x.new_empty((*x.shape[:-1], len(weight)))


def _attention(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, path: Tensor, depth: Tensor, scale: float, window: int, out: Tensor
) -> None:  # fmt: skip
    count = -(-key.shape[2] // PART_KEYS)
    parts_SRQHh = q.new_empty((count, *q.shape), dtype=torch.float32)
    lse_SRQH = parts_SRQHh.new_empty(parts_SRQHh.shape[:4])
    depth = depth.contiguous()
    _ops.kernels("order").parts(q, key, value, length, path, depth, scale, window, PART_KEYS, parts_SRQHh, lse_SRQH)
    _ops.kernels("order").combine(parts_SRQHh, lse_SRQH, out)


def _attention_by_torch(
    q_RQHh: Tensor, key_RKWh: Tensor, value_RKWh: Tensor, length_R: Tensor, path_RQT: Tensor, depth_RQ: Tensor, scale: float,
    window: int,
) -> Tensor:  # fmt: skip
    (R, Q, H, h), (K, W), T = q_RQHh.shape, key_RKWh.shape[1:3], path_RQT.shape[2]
    place_RP = torch.arange(W).expand(R, W)
    below_RQP = (place_RP - length_R[:, None])[:, None].expand(R, Q, W)  # the depth that a position would be
    node_RQP = path_RQT.gather(2, below_RQP.clamp(0, T - 1))
    slot_RQP = torch.where(below_RQP < 0, place_RP[:, None], length_R[:, None, None] + node_RQP)
    seen_RQP = below_RQP <= depth_RQ[..., None]
    if window:
        seen_RQP = seen_RQP & (depth_RQ[..., None] - below_RQP < window)
    index_RKQPh = slot_RQP.clamp(0, W - 1)[:, None, :, :, None].expand(R, K, Q, W, h)
    key, value = (x[:, :, None].expand(R, K, Q, W, h).gather(3, index_RKQPh).float() for x in (key_RKWh, value_RKWh))
    q_RKQGh = q_RQHh.view(R, Q, K, H // K, h).transpose(1, 2).float()
    scores = torch.einsum("rkqgh,rkqph->rkqgp", q_RKQGh, key) * scale
    weight = scores.masked_fill(~seen_RQP[:, None, :, None], -torch.inf).softmax(-1)
    # slots that nobody has written to may hold NaN, which a weight of zero would keep
    value = value.masked_fill(~seen_RQP[:, None, ..., None], 0.0)
    return torch.einsum("rkqgp,rkqph->rqkgh", weight, value).reshape(R, Q, H, h).to(q_RQHh.dtype)


@operator(_attention, _attention_by_torch)
def fixed_attention(
    q: Tensor, key: Tensor, value: Tensor, length: Tensor, path: Tensor, depth: Tensor, scale: float, window: int
) -> Tensor:
    """Attention [R, Q, H, h] of nodes to the committed slots of their rows and to their ancestors.

    Args:
        q, key, value: [R, Q, H, h]; [R, K, W, h], a slot each.
        length: int64 [R]; committed slots, each of which is its position.
        path: see `paths`.
        depth: int64 [R, Q]; of the new nodes below the committed tokens.
        window: positions that a node sees, itself included; 0: all.
    """
    return q.new_empty(q.shape)
