"""The first weights of a new head, fitted to a sample of the training data. This module knows no method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from eyas.drafters import Batch, DraftMethod
from eyas.nn import Documents
from eyas.nn.fitting import sample_tokens
from eyas_train.data import Batches, Example
from eyas_train.features import encode

__all__ = ["FitsStart", "fit_start"]


@runtime_checkable
class FitsStart(Protocol):
    """A method whose new net can be fitted before its training."""

    @property
    def start_layers(self) -> tuple[int, ...]:
        """The layers whose features the fit reads, ascending; (): nothing is fitted."""
        ...

    def fit_start(self, batch: Batch) -> str:
        """Fit the first weights to a sample of the training data, with the features of `start_layers`. Return the
        result in words."""
        ...


def fit_start(
    drafter: DraftMethod,
    examples: Sequence[Example],
    batch_tokens: int,
    seed: int,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Fit a new head's first weights; return the result in words, "" for a method that has no such fit.

    It reads the first examples of the first epoch, so that another process finds the same ones.

    Args:
        on_tokens: called with the tokens that are read, and their number in all.
    """
    if not isinstance(drafter, FitsStart) or not (layers := drafter.start_layers):
        return ""
    wanted, tokens = sample_tokens(len(layers) * drafter.target.hidden_size), 0
    batches, chosen = Batches(examples, batch_tokens, seed), list[Sequence[int]]()
    for batch in batches.plan(0):
        chosen.append(batch)
        tokens += batches.tokens(batch)
        if tokens >= wanted:
            break
    parts = list(map(batches.load, chosen))
    features, done = [], 0
    for ids_N, _, documents in parts:
        features.append(encode(drafter.target, ids_N, documents, layers))
        done += len(ids_N)
        on_tokens(done, tokens)
    features_NF = torch.cat(features)
    ids_N = torch.cat([ids_N for ids_N, _, _ in parts]).to(features_NF.device)
    counted_N = torch.cat([counted_N for _, counted_N, _ in parts]).to(features_NF.device)
    documents = Documents(tuple(length for _, _, documents in parts for length in documents.lengths))
    net: nn.Module = drafter.net  # type: ignore[assignment]
    dtype = next(net.parameters()).dtype
    net.float()  # of a target in half precision
    told = drafter.fit_start(Batch(ids_N, features_NF, counted_N, documents))
    net.to(dtype)
    return told
