"""Where a training step's features come from: the frozen target in this process (online).

Letters: R examples of a batch, T tokens of the longest of them, N tokens of all, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.drafters._base import Batch, Drafter
from eyas.train.data import Batches

__all__ = ["batch_of"]


def batch_of(batches: Batches, indices: Sequence[int], drafter: Drafter) -> Batch:
    """These examples, packed, with the features that the drafter's loss reads.

    The target reads them padded to the longest; padding is left out of what it saw.
    """
    target = drafter.target
    tokens_N, counted_N, documents = batches.load(indices)
    lengths = torch.tensor(documents.lengths)
    inside_RT = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens_RT = torch.zeros(inside_RT.shape, dtype=torch.long).masked_scatter_(inside_RT, tokens_N)
    features_RTF = target.encode(tokens_RT.to(target.device), drafter.studies)
    return Batch(tokens_N.to(target.device), features_RTF[inside_RT.to(target.device)], counted_N.to(target.device), documents)
