"""Log-probabilities of the tokens of a cycle's path.

They are the float32 log-softmax of the target's raw logits at the node before each token. They are part of the
cycle, because recorded cycles compute them too. A cycle computes them only if a feature of a row asks for them
(`RowFeature.top_tokens`). The number of most probable tokens is rounded up to one of a few widths, so that few
recordings of cycles are needed.

This module knows no model and no requests. Letters: B rows, N nodes, P places of the longest path,
V vocabulary, W width (a number of most probable tokens), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core.tree import Verdict

__all__ = ["TokenLogprobs", "logprob_table", "path_logprobs", "width_for"]

WIDTHS = (0, 1, 5, 20)  # numbers of top tokens that are gathered; above 20, powers of two


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of one token, and the most probable tokens in its place.

    They are the float32 log-softmax of the target's raw logits, before penalties, masks and temperature. `logprob`
    and the values in `top` are the same floats where the token is among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the most probable first


def width_for(counts: Iterable[int | None], vocab: int) -> int | None:
    """Return the smallest width that is enough for all of these numbers of tokens; None if all are None."""
    max_count = max((count for count in counts if count is not None), default=None)
    if max_count is None:
        return None
    width = next((width for width in WIDTHS if width >= max_count), 0) or (
        1 << (max_count - 1).bit_length() if max_count else 0
    )
    return min(width, vocab)


def path_logprobs(logits_BNV: Tensor, verdict: Verdict, width: int) -> Tensor:
    """Return float64 [B, P, 1 + 2 W]. Each node of the path has the log-probability of the token after it, the
    log-probabilities of the W most probable tokens, and their ids. Values past the end of a path have no
    meaning."""
    B, V = logits_BNV.shape[0], logits_BNV.shape[-1]
    node_BP = verdict.path_BP.clamp(min=0)
    last_B1 = verdict.length_B[:, None] - 1
    next_BP = verdict.tokens_BP.roll(-1, dims=1).scatter(1, last_B1, verdict.bonus_B[:, None])
    logits_BPV = logits_BNV.gather(1, node_BP[..., None].expand(-1, -1, V))
    return logprob_table(logits_BPV.flatten(0, 1), next_BP.flatten(), width).view(B, -1, 1 + 2 * width)


def logprob_table(logits_NV: Tensor, tokens_N: Tensor, width: int) -> Tensor:
    """Return the table that `path_logprobs` describes, float64 [N, 1 + 2 W]. Float64 holds ids and float32
    alike, so the host reads everything at once."""
    logp_NV = logits_NV.float().log_softmax(-1)
    top_NW, ids_NW = logp_NV.topk(width, dim=-1)
    return torch.cat([logp_NV.gather(1, tokens_N[:, None]).double(), top_NW.double(), ids_NW.double()], dim=1)
