"""Reads how often a head's drafts were accepted in its training: the controller begins with this share, and says so
where much fewer are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from eyas.adaptive.goodput import PRIOR_CHANCE
from eyas.core.drafter import Drafter
from eyas.core.requests import Step
from eyas.errors import InputError
from eyas.files import parse_json

__all__ = ["AcceptanceCheck", "first_chance", "trained_chance"]

log = logging.getLogger(__name__)  # the command line shows its messages

LEAST, MOST = 0.02, 0.98  # a measured share on few texts may be 0 or 1
CHECKED_CYCLES = 200  # drafted cycles after which the head is judged, once
MIN_SHARE = 0.5  # of what its training measured


def first_chance(drafter: Drafter) -> float:
    """Return `trained_chance` for a plan: PRIOR_CHANCE where it is unknown, and neither 0 nor 1."""
    chance = trained_chance(drafter)
    return PRIOR_CHANCE if chance is None else min(MOST, max(LEAST, chance))


def trained_chance(drafter: Drafter) -> float | None:
    """Return the share of first draft tokens that the target accepted on held-out texts, by the `training.json` in the
    head's folder; None if there is none, or it does not say."""
    source = getattr(drafter, "source", None)
    if source is None:
        return None
    try:
        record = parse_json((Path(source).expanduser() / "training.json").read_bytes())
        return float(record["heldout"]["0-alpha"])
    except (OSError, InputError, LookupError, TypeError, ValueError):
        return None


class AcceptanceCheck:
    """Warns once of a head that accepts less than half of what its training measured: it is another model's, or
    something that it reads has changed.

    Args:
        trained: the share of first draft tokens that were accepted in training, along a chain; None: nothing is checked.
    """

    def __init__(self, trained: float | None) -> None:
        self.trained = trained
        self._cycles = self._accepted = 0

    def observe(self, steps: Sequence[Step]) -> None:
        """Count a cycle of greedy rows in which the head drafted, or guesses from the text that promised more. A tree has
        the chain's first draft token among others, so its first level is accepted at least as often."""
        if self.trained is None or self._cycles >= CHECKED_CYCLES:
            return
        self._cycles += len(steps)
        self._accepted += sum(len(step.path) > 1 for step in steps)
        if self._cycles < CHECKED_CYCLES:
            return
        share = self._accepted / self._cycles
        if share < MIN_SHARE * self.trained:
            log.warning(
                "the target accepts %.0f %% of the head's first drafts here, and accepted %.0f %% in its training: look at whether it was "
                "trained for this model, chat template and language",
                100 * share,
                100 * self.trained,
            )
