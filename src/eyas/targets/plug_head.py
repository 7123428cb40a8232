"""Plugs what is known about heads and targets into the socket "head" (core/sockets.py): whether they are made for each
other, by fingerprints or by their embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from eyas.core.target import Target
from eyas.targets.fingerprints import base_has_fingerprint, has_fingerprint
from eyas.targets.quantised import library_of

__all__ = ["doubts"]


def doubts(method: Any, draft: str, target: Target) -> Iterator[str]:
    """Yield warnings about a head that may draft little for the target."""
    if method.needs_weights and not target.head_is_exact:
        yield f"the lm_head of {target.name} does something that eyas does not know: fewer drafts may be accepted"
    if method.target_fingerprint:
        if doubt := _other_weights(method, draft, target):
            yield doubt
    elif _knows_other_tokens(method, target):
        yield (
            f"the token embeddings in {draft} are not those of {target.name}: the head was made for another model, so little of "
            "the text may be drafted; the text stays the same"
        )


def _other_weights(method: Any, draft: str, target: Target) -> str:
    """Return a warning if the head was trained for other weights than the target's."""
    recorded = method.target_fingerprint
    if base_has_fingerprint(target, recorded):
        if not method.needs_weights:
            return ""
        return f"{draft} was trained for {target.name} alone: with an adapter less of the text may be drafted"
    if has_fingerprint(target, recorded):
        return ""
    known = "other weights than these quantised ones" if library_of(target.model) else "another target"
    return f"{draft} was trained for {known}: the text stays the same, but less of it may be drafted"


def _knows_other_tokens(method: Any, target: Target) -> bool:
    """Return whether a head brings an embedding table of the target's width that is another model's. Training
    and rounding leave most of a table's directions as they were; two models' tables are unrelated."""
    table = getattr(method, "embed_tokens", None)
    if table is None or table.shape[1] != target.hidden_size:
        return False
    ids = torch.arange(len(table), device=table.device)[:: max(1, len(table) // 4096)]
    own, theirs = table[ids].float(), target.embed(ids).float()
    return bool(torch.nn.functional.cosine_similarity(own, theirs, dim=-1).mean() < 0.5)
