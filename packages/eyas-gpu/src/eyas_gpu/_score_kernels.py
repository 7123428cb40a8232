"""Triton kernel of scores: temperature, top-k, top-p and min-p without a sort. The reference:
`core.sampling.apply_sampling`, steps 6 to 9.

Each filter is a threshold. Logits are ordered by their bits, as whole numbers ("keys"), so the
threshold is found two bits at a time:

    top-k    the largest key that k tokens reach; ties with the k-th token stay, as in the reference
    top-p    the largest key below which at most 1 - p of the probability lies; of the tokens with this very key, the first in the
             vocabulary go as long as their probability fits into what is left of 1 - p: a stable sort's order, as a GPU's is

bfloat16 has 16 bits, so 8 passes over the vocabulary are enough for one filter, from a GPU's cache.
Sums are taken in float32 in a fixed order; a token whose cumulative probability lies within their
rounding of 1 - p may be excluded here and not there.

This module is imported on GPUs and by tests with Triton's interpreter only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["filtered"]

BLOCK_V = 2048


@triton.jit
def _key(logit, BITS: tl.constexpr):
    """int64 numbers from 0 that are ordered as the logits; only comparisons of logits depend on them."""
    if BITS == 16:
        bits = logit.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
        key = tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)
    else:
        bits = logit.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        key = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return key


@triton.jit
def _load(logits, start, V, temperature, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the vocabulary: scores, keys, and which tokens there are."""
    v = start + tl.arange(0, BLOCK)
    logit_V = tl.load(logits + v, mask=v < V, other=float("-inf"))
    return tl.div_rn(logit_V.to(tl.float32), temperature), _key(logit_V, BITS), v < V


@triton.jit(do_not_specialize=["top_k", "turns_k", "turns_p"])
def _filter_kernel(
    logits, scores, V, temperature, top_k, rest, min_p, turns_k, turns_p, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One node. rest: 1 - p. turns_k, turns_p: half the bits, or 0 without the filter: one compiled
    kernel serves every Sampling."""
    logits += tl.program_id(0).to(tl.int64) * V
    scores += tl.program_id(0).to(tl.int64) * V
    top_V = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        score_V, _, _ = _load(logits, start, V, temperature, BITS, BLOCK)
        top_V = tl.maximum(top_V, score_V)
    top = tl.max(top_V, 0)
    least_k = tl.full([], 0, tl.int64)  # smaller keys are excluded by top-k
    for turn in range(0, turns_k):
        step = tl.full([], 1, tl.int64) << (BITS - 2 - 2 * turn)
        one_V, two_V, three_V = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, V, BLOCK):
            _, key_V, there_V = _load(logits, start, V, temperature, BITS, BLOCK)
            one_V += (there_V & (key_V >= least_k + step)).to(tl.int32)
            two_V += (there_V & (key_V >= least_k + 2 * step)).to(tl.int32)
            three_V += (there_V & (key_V >= least_k + 3 * step)).to(tl.int32)
        passed = (tl.sum(one_V, 0) >= top_k).to(tl.int64) + (tl.sum(two_V, 0) >= top_k).to(tl.int64)
        least_k += step * (passed + (tl.sum(three_V, 0) >= top_k).to(tl.int64))
    least_p = tl.full([], 0, tl.int64)  # smaller keys are excluded by top-p
    ties = tl.full([], 0, tl.int64)  # how many tokens with this key are excluded
    whole_V, highest_V = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, V, BLOCK):
        score_V, key_V, there_V = _load(logits, start, V, temperature, BITS, BLOCK)
        whole_V += tl.where(there_V & (key_V >= least_k), tl.exp(score_V - top), 0.0)
        highest_V = tl.maximum(highest_V, tl.where(there_V, key_V, 0))
    limit, below = rest * tl.sum(whole_V, 0), tl.full([], 0.0, tl.float32)
    for turn in range(0, turns_p):
        step = tl.full([], 1, tl.int64) << (BITS - 2 - 2 * turn)
        one_V, two_V, three_V = (
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
            tl.zeros([BLOCK], tl.float32),
        )
        for start in range(0, V, BLOCK):
            score_V, key_V, there_V = _load(logits, start, V, temperature, BITS, BLOCK)
            weight_V = tl.where(there_V & (key_V >= least_k), tl.exp(score_V - top), 0.0)
            one_V += tl.where(key_V < least_p + step, weight_V, 0.0)
            two_V += tl.where(key_V < least_p + 2 * step, weight_V, 0.0)
            three_V += tl.where(key_V < least_p + 3 * step, weight_V, 0.0)
        one, two, three = tl.sum(one_V, 0), tl.sum(two_V, 0), tl.sum(three_V, 0)
        below = tl.where(three <= limit, three, tl.where(two <= limit, two, tl.where(one <= limit, one, below)))
        least_p += step * ((one <= limit).to(tl.int64) + (two <= limit).to(tl.int64) + (three <= limit).to(tl.int64))
    highest = tl.max(highest_V, 0)
    least_p = tl.minimum(least_p, highest)  # the most probable token stays
    with_it_V, weight_of_it_V = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        score_V, key_V, there_V = _load(logits, start, V, temperature, BITS, BLOCK)
        with_it_V += (there_V & (key_V == least_p)).to(tl.int32)
        weight_of_it_V = tl.maximum(weight_of_it_V, tl.where(there_V & (key_V == least_p), tl.exp(score_V - top), 0.0))
    weight = tl.max(weight_of_it_V, 0)
    fitting = tl.where(weight > 0.0, tl.floor((limit - below) / tl.where(weight > 0.0, weight, 1.0)), 0.0)
    ties = tl.minimum(tl.maximum(fitting, 0.0), 2.0e9).to(tl.int64)
    ties = tl.minimum(ties, tl.sum(with_it_V, 0).to(tl.int64) - 1)
    seen = tl.full([], 0, tl.int64)  # tokens with the key of the threshold so far
    for start in range(0, V, BLOCK):
        score_V, key_V, there_V = _load(logits, start, V, temperature, BITS, BLOCK)
        stays_V = key_V >= least_k
        tie_V = there_V & (key_V == least_p)
        place_V = seen + tl.cumsum(tie_V.to(tl.int32), 0)  # from 1 on
        stays_V = stays_V & ((key_V > least_p) | (tie_V & (place_V > ties)))
        seen += tl.sum(tie_V.to(tl.int32), 0)
        stays_V = stays_V & (tl.exp(score_V - top) >= min_p)
        stays_V = stays_V | (score_V != score_V)  # NaN is reported by the draw
        v = start + tl.arange(0, BLOCK)
        tl.store(scores + v, tl.where(stays_V, score_V, float("-inf")), mask=there_V)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, scores: Tensor) -> None:
    """Fill `scores`, float32 in the shape of `logits` [..., V]."""
    logits, V = logits.contiguous(), logits.shape[-1]
    if logits.dtype == torch.float16:
        logits = logits.float()
    bits = 8 * logits.element_size()
    turns = bits // 2
    _filter_kernel[(logits.numel() // V,)](
        logits, scores, V, temperature, top_k, float(1 - top_p), float(min_p), turns if 0 < top_k < V else 0, turns if top_p < 1.0 else 0,
        BITS=bits, BLOCK=min(BLOCK_V, triton.next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
