"""What a saved state belongs to: hashes of the data, and of what a head holds that is not trained."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from eyas.core.drafter import Drafter
from eyas.train.data import Example

__all__ = ["beside_net", "examples_hash"]


def examples_hash(examples: Sequence[Example], heldout: Sequence[Example]) -> str:
    """SHA-256 of the tokens and marks of both, in order: a place in the data means something for the same data only."""
    digest = hashlib.sha256()
    for side in (examples, heldout):
        for example in side:
            digest.update(array("i", example.ids).tobytes())
            digest.update(bytes(example.counted) + b"|")
        digest.update(b"||")
    return digest.hexdigest()


def beside_net(drafter: Drafter) -> str:
    """SHA-256 of what the head's checkpoint holds that is not trained: its draft vocabulary, embeddings of its own."""
    assert drafter.net is not None
    trained, digest = set(drafter.net.state_dict()), hashlib.sha256()
    for name, value in sorted(drafter.weights().tensors.items()):
        if name not in trained:
            digest.update(f"{name}{tuple(value.shape)}".encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
