"""Which tokens the training data asks for: what a draft vocabulary is chosen from. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.train.data import FIRST_COUNTABLE, Example

__all__ = ["count_tokens"]

AT_ONCE = 1 << 20  # tokens


def count_tokens(examples: Sequence[Example], vocab_size: int) -> Tensor:
    """int64 [V]: how often each token counts, that is, how often its prediction will be trained in one epoch."""
    counts_V, waiting = torch.zeros(vocab_size, dtype=torch.long), list[int]()
    for i in range(len(examples)):
        ids, counted = examples[i]
        waiting += [token for token, counts in zip(ids[FIRST_COUNTABLE:], counted[FIRST_COUNTABLE:], strict=True) if counts]
        if len(waiting) >= AT_ONCE or i + 1 == len(examples):
            counts_V += torch.bincount(torch.tensor(waiting, dtype=torch.long), minlength=vocab_size)
            waiting = []
    return counts_V
