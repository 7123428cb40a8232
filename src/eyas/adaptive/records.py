"""What the record of a head's training (`training.json`) says about its drafts, before the first one."""

from __future__ import annotations

from pathlib import Path

from eyas.core.drafter import Drafter
from eyas.errors import InputError
from eyas.files import parse_json

__all__ = ["first_chance"]

LEAST, MOST = 0.02, 0.98  # a measured share on few texts may be 0 or 1


def first_chance(drafter: Drafter) -> float | None:
    """Return how often the head's first draft token was accepted on the texts that its training held out; None
    where no record beside the head says so."""
    source = getattr(drafter, "source", None)
    if source is None:
        return None
    try:
        record = parse_json((Path(source).expanduser() / "training.json").read_bytes())
        chance = record["heldout"]["0-alpha"]
        return min(MOST, max(LEAST, float(chance)))
    except (OSError, InputError, LookupError, TypeError, ValueError):
        return None
