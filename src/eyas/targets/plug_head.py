"""Plugs the fingerprints of targets into the socket "head" (core/sockets.py)."""

from __future__ import annotations

from typing import Any

from eyas.core.target import Target
from eyas.targets.fingerprints import base_has_fingerprint, has_fingerprint
from eyas.targets.quantised import library_of

__all__ = ["doubt"]


def doubt(method: Any, draft: str, target: Target) -> str:
    """Return a warning if the head was trained for other weights than the target's."""
    recorded = method.target_fingerprint
    if not recorded:
        return ""
    if base_has_fingerprint(target, recorded):
        if not method.needs_weights:
            return ""
        return f"{draft} was trained for {target.name} alone: with an adapter less of the text may be drafted"
    if has_fingerprint(target, recorded):
        return ""
    known = "other weights than these quantised ones" if library_of(target.model) else "another target"
    return f"{draft} was trained for {known}: the text stays the same, but less of it may be drafted"
