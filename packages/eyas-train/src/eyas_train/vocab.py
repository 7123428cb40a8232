"""Token counts of training data, and the draft vocabulary that is chosen from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.drafters.eagle3 import MAX_DRAFT_VOCABULARY
from eyas_train._chat import FIRST_COUNTABLE
from eyas_train.data import Example

__all__ = ["choose_draft_vocabulary", "count_tokens"]

log = logging.getLogger("eyas.train")  # the command line shows its messages

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


def choose_draft_vocabulary(counts_V: Tensor, size: int | None) -> Tensor | None:
    """Return the most frequent tokens, int64 [v], ascending; None for the whole vocabulary. With `size` tokens, or as many
    as occur."""
    distinct = int((counts_V > 0).sum())
    if size is not None and size > distinct:
        told_size = "head.draft_vocab %d: the training data has %d different tokens that count, so it is %d"
        log.info(told_size, size, distinct, distinct)
    size = min(size or MAX_DRAFT_VOCABULARY, max(distinct, 1))
    if size >= len(counts_V):
        return None
    return counts_V.argsort(descending=True, stable=True)[:size].sort().values
