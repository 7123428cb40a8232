"""Figures of speculative decoding: one fold over Steps, and numbers computed from its counts.

Symbols are the papers' (EAGLE-1, section 5; Leviathan et al. 2023). docs/guide/benchmark.md explains them
at length.

    cycle       one pass of the target over a draft tree. The prompt's own pass is not a cycle, and the token that it gives belongs to none.
    emitted     tokens that a cycle hands out, the bonus token included, after cutting at EOS, stop strings and `max_new_tokens`
    tau         emitted tokens / cycles
    margin      distance of the two best scores at the first token where two texts differ: how near the tie was

eyas-lab has acceptance by depth (`eyas_lab.metrics`), ratios and their intervals (`eyas_lab.bench.intervals`). This module
knows no method, no tokenizer and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eyas.core.adjustments import Adjustments
from eyas.core.cache import common_prefix
from eyas.core.engine import Request
from eyas.core.rows import Row
from eyas.core.sampling import GumbelNoise, apply_sampling
from eyas.core.target import Target
from eyas.core.totals import StepTotals, tau, tokens_per_second

__all__ = ["StepTotals", "first_difference", "margin", "tau", "tokens_per_second"]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or at which the shorter text ends; None for equal texts."""
    same = common_prefix(one, other)
    return None if same == len(one) == len(other) else same


@torch.inference_mode()
def margin(target: Target, request: Request, prefix: Sequence[int]) -> float | None:
    """Return the distance of the two best scores for the token that follows `prefix`, the request's noise included.

    Args:
        prefix: new tokens of the answer, all before the token in question.

    Returns:
        log-probabilities' (sampled) or logits' (greedy) difference; None where sampling allows a
        single token.
    """
    sampling, session = request.sampling, target.open(1)
    ids = [*request.prompt, *prefix]
    session.reserve(len(ids))
    row = Row.from_request(0, request, target)
    for token in prefix:
        row.append(token)
    scores_1V = apply_sampling(session.prefill(0, ids)[None], sampling, Adjustments.stack([row.adjustments()]))
    if not sampling.greedy:
        position_11 = torch.tensor([[len(ids)]], device=scores_1V.device)
        noise = GumbelNoise.from_sampling([sampling], scores_1V.device)
        scores_1V = scores_1V.log_softmax(-1) + noise.gumbel(position_11, scores_1V.shape[-1])[:, 0]
    best, second = scores_1V[0].topk(2).values.tolist()
    return float(best - second) if math.isfinite(second) else None
