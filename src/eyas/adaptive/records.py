"""Reads how often a head's drafts were accepted in its training: the controller begins with that."""

from __future__ import annotations

from pathlib import Path

from eyas.adaptive.goodput import PRIOR_CHANCE
from eyas.core.drafter import Drafter
from eyas.errors import InputError
from eyas.files import parse_json

__all__ = ["first_chance"]

LEAST, MOST = 0.02, 0.98  # a measured share on few texts may be 0 or 1


def first_chance(drafter: Drafter) -> float:
    """Return the share of first draft tokens that the target accepted on held-out texts, by the `training.json` in the
    head's folder; PRIOR_CHANCE where there is none, or it does not say."""
    source = getattr(drafter, "source", None)
    if source is None:
        return PRIOR_CHANCE
    try:
        record = parse_json((Path(source).expanduser() / "training.json").read_bytes())
        return min(MOST, max(LEAST, float(record["heldout"]["0-alpha"])))
    except (OSError, InputError, LookupError, TypeError, ValueError):
        return PRIOR_CHANCE
