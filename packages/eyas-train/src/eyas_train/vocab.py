"""Token counts of training data, from which a draft vocabulary is chosen. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas_train._chat import FIRST_COUNTABLE
from eyas_train.data import Example

__all__ = ["count_tokens"]

TOKENS_AT_ONCE = 1 << 20


def count_tokens(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """Return int64 [V]: how often the prediction of each token is trained in one epoch."""
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    tokens: list[int] = []
    for i in range(len(examples)):
        ids, counted = examples[i]
        tokens += [
            token for token, counts in zip(ids[FIRST_COUNTABLE:], counted[FIRST_COUNTABLE:], strict=True) if counts
        ]
        if len(tokens) >= TOKENS_AT_ONCE or i + 1 == len(examples):
            counts_V += torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=vocab_size)
            tokens = []
    return counts_V
