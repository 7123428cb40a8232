"""Hashes of the examples and of the head's untrained tensors, which decide whether a saved state
belongs to a run.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from eyas.drafters import DraftMethod
from eyas_train.data import Example

__all__ = ["examples_hash", "untrained_hash"]


def examples_hash(examples: Sequence[Example], heldout: Sequence[Example]) -> str:
    """Return SHA-256 of the tokens of both sets and of which of them count, in order: a place in the data
    is only valid for the same data.
    """
    digest = hashlib.sha256()
    for part in (examples, heldout):
        for example in part:
            digest.update(array("i", example.ids).tobytes())
            digest.update(bytes(example.counted) + b"|")
        digest.update(b"||")
    return digest.hexdigest()


def untrained_hash(drafter: DraftMethod) -> str:
    """Return SHA-256 of the tensors of the head's checkpoint that are not trained, such as its draft
    vocabulary and its own embeddings.
    """
    assert drafter.net is not None
    trained = set(drafter.net.state_dict())
    digest = hashlib.sha256()
    for name, value in sorted(drafter.weights().tensors.items()):
        if name not in trained:
            content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            digest.update(f"{name}{tuple(value.shape)}".encode() + content)
    return digest.hexdigest()
