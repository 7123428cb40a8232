"""Log-probabilities of emitted tokens and of prompts, as `TokenLogprobs`.

They are the float32 log-softmax of the target's raw logits at the node before each token. On the
device they are computed only if a row of the batch asks for them; the number of most probable
tokens is rounded up to one of a few widths, so that few recordings of cycles are needed.

This module knows no model and no requests. Letters: B rows, N nodes, P places of the longest path,
V vocabulary, W width (a number of most probable tokens), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from eyas.core.requests import TokenLogprobs
from eyas.core.tree import Verdict

__all__ = ["PromptLogprobs", "path_logprobs", "to_token_logprobs", "width_for"]

WIDTHS = (0, 1, 5, 20)  # numbers of top tokens that are gathered; above 20, powers of two
PROMPT_TOKENS_AT_A_TIME = 64  # a prompt's log-softmax is computed for this many tokens at a time


def width_for(counts: Iterable[int | None], vocab: int) -> int | None:
    """The smallest width that is enough for all of these numbers of tokens; None if all are
    None."""
    most = max((count for count in counts if count is not None), default=None)
    if most is None:
        return None
    width = next((width for width in WIDTHS if width >= most), 0) or (1 << (most - 1).bit_length() if most else 0)
    return min(width, vocab)


def path_logprobs(logits_BNV: Tensor, verdict: Verdict, width: int) -> Tensor:
    """float64 [B, P, 1 + 2 W]: for each node of the path the log-probability of the token after it,
    those of the W most probable tokens, and their ids. Values past the end of a path have no
    meaning."""
    B, V = logits_BNV.shape[0], logits_BNV.shape[-1]
    node_BP = verdict.path_BP.clamp(min=0)
    last_B1 = verdict.length_B[:, None] - 1
    next_BP = verdict.tokens_BP.roll(-1, dims=1).scatter(1, last_B1, verdict.bonus_B[:, None])
    logits_BPV = logits_BNV.gather(1, node_BP[..., None].expand(-1, -1, V))
    return _logprob_table(logits_BPV.flatten(0, 1), next_BP.flatten(), width).view(B, -1, 1 + 2 * width)


def _logprob_table(logits_NV: Tensor, tokens_N: Tensor, width: int) -> Tensor:
    """float64 [N, 1 + 2 W]: see `path_logprobs`. Float64 holds ids and float32 alike, so the host
    reads everything at once."""
    logp_NV = logits_NV.float().log_softmax(-1)
    top_NW, ids_NW = logp_NV.topk(width, dim=-1)
    return torch.cat([logp_NV.gather(1, tokens_N[:, None]).double(), top_NW.double(), ids_NW.double()], dim=1)


def to_token_logprobs(table: Iterable[Sequence[float]], tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """The TokenLogprobs of these tokens, each with the `count` most probable tokens, from rows of
    `path_logprobs`."""
    entries = []
    for token, (logprob, *rest) in zip(tokens, table, strict=False):
        width = len(rest) // 2
        top = zip(map(int, rest[width : width + count]), rest[:count], strict=True)
        entries.append(TokenLogprobs(token, logprob, tuple(top)))
    return tuple(entries)


class PromptLogprobs:
    """Collects the TokenLogprobs of a prompt while it is read, chunk by chunk."""

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self.prompt, self.count = prompt, count
        self.entries: list[TokenLogprobs | None] = [None]  # nothing precedes the first token

    def read(self, logits_TV: Tensor, position: int) -> None:
        """Read the logits after the tokens from `position` on. Those after the prompt's last token
        are for the answer's first, so they are ignored."""
        assert position == len(self.entries) - 1, "every token is read once, in order"
        following = self.prompt[position + 1 : position + 1 + len(logits_TV)]
        for begin in range(0, len(following), PROMPT_TOKENS_AT_A_TIME):
            tokens = following[begin : begin + PROMPT_TOKENS_AT_A_TIME]
            tokens_N = torch.tensor(tokens, device=logits_TV.device)
            table = _logprob_table(logits_TV[begin : begin + len(tokens)], tokens_N, self.count)
            self.entries += to_token_logprobs(table.tolist(), tokens, self.count)
