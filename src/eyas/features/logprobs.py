"""Log-probabilities of emitted tokens and of prompts, as `TokenLogprobs`.

`Step.extra` has "logprobs" of the emitted tokens. In the prefill step it also has "prompt_logprobs" of the
prompt's tokens, with None for the first one. The prompt is then read as a whole, even if its beginning is in a
cache. `core.logprobs` computes them in a cycle. Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.core.features import PromptLogits, RowFeature
from eyas.core.logprobs import TokenLogprobs, logprob_table
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Cycle
from eyas.errors import InputError

__all__ = ["Logprobs"]

PROMPT_TOKENS_AT_A_TIME = 64  # a prompt's log-softmax is computed for this many tokens at a time


@dataclass(frozen=True)
class Logprobs(RequestFeature):
    """Log-probabilities of the answer's tokens, of the prompt's, or of both.

    Attributes:
        answer: every emitted token comes with its log-probability and with this many most probable tokens and
            theirs; None: without.
        prompt: the same for the tokens of the prompt.
    """

    answer: int | None = None
    prompt: int | None = None

    def check(self, request: Request, vocab: int) -> None:
        for name, count in (("logprobs", self.answer), ("prompt_logprobs", self.prompt)):
            if count is not None and not 0 <= count <= vocab:
                raise InputError(f"{name} must be from 0 to the size of the vocabulary ({vocab}), got {count}")

    def prompt_logits(self, prompt: Sequence[int]) -> PromptLogits | None:
        return None if self.prompt is None else _PromptLogprobs(prompt, self.prompt)

    def open(self, request: Request, target: Target) -> RowFeature:
        return _RowLogprobs(self.answer)


class _RowLogprobs(RowFeature):
    def __init__(self, top_tokens: int | None) -> None:
        self.top_tokens = top_tokens

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        if self.top_tokens is None:
            return {}
        assert cycle.logprobs_BPX is not None
        return {"logprobs": to_token_logprobs(cycle.logprobs_BPX[row].tolist(), tokens, self.top_tokens)}


def to_token_logprobs(table: Iterable[Sequence[float]], tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Return the TokenLogprobs of these tokens, each with the `count` most probable tokens, from rows of
    `core.logprobs.path_logprobs`."""
    entries = []
    for token, (logprob, *rest) in zip(tokens, table, strict=False):
        width = len(rest) // 2
        top = zip(map(int, rest[width : width + count]), rest[:count], strict=True)
        entries.append(TokenLogprobs(token, logprob, tuple(top)))
    return tuple(entries)


class _PromptLogprobs(PromptLogits):
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
            table = logprob_table(logits_TV[begin : begin + len(tokens)], tokens_N, self.count)
            self.entries += to_token_logprobs(table.tolist(), tokens, self.count)

    def report(self) -> Mapping[str, Any]:
        return {"prompt_logprobs": tuple(self.entries)}
