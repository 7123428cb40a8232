"""Knowledge about a head before it drafts on this machine, kept for the next process.

`Memory` is a small file in the user's cache folder for each target, head, format and machine: how the head's drafts were
accepted, and how many tokens they brought. Without it, each process finds out again in its first hundreds of cycles
whether drafts pay and which trees do. `trained_chance` reads how often drafts were accepted in the head's training: the
controller begins with this share, and says so where much fewer are accepted. A file that is missing, damaged or of
another key counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.adaptive.cost import KeptFile, cost_key
from eyas.adaptive.goodput import PRIOR_CHANCE
from eyas.core.drafter import Drafter
from eyas.core.requests import Step
from eyas.errors import InputError
from eyas.files import parse_json

__all__ = ["AcceptanceCheck", "Memory", "Remembered", "first_chance", "trained_chance"]


FORMAT = 1  # files of another version are not read
FIRST_KEPT, KEPT_EVERY = 64, 1024  # cycles until the file is first written; from then on twice as many, at most so many


@dataclass(frozen=True)
class Remembered:
    """The knowledge of a controller when it last wrote."""

    trees: tuple[tuple[float, ...], ...] = ()  # `Acceptance.sums`; empty: the method grows no trees
    # range of numbers of rows; tokens of a cycle and row in which the method drafted
    tokens: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Remembered:
        """Return the values that `asdict` made these fields of; ValueError, KeyError or TypeError for anything else."""
        trees = tuple(tuple(float(x) for x in sums) for sums in fields["trees"])
        tokens = tuple((int(rows), float(mean)) for rows, mean in fields["tokens"])
        if not all(math.isfinite(x) and x >= 0 for sums in trees for x in sums):
            raise ValueError("not all sums are positive numbers")
        if not all(math.isfinite(mean) and mean >= 1 for _, mean in tokens):
            raise ValueError("a cycle yields at least one token")
        return cls(trees, tokens)


class Memory(KeptFile):
    """The file of one drafter."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        super().__init__(path, key)
        self._cycles, self._due = 0, FIRST_KEPT

    @classmethod
    def of(cls, drafter: Drafter) -> Memory:
        """Return the file for this target, head, format and machine."""
        return cls.for_key("paid", cost_key(drafter) | {"memory": FORMAT, "weights": _digest(drafter)})

    def read(self) -> Remembered | None:
        """Return the kept figures; None without a file that can be used."""
        return self.load("remembered", Remembered.from_json)

    def is_due(self) -> bool:
        """Count one more cycle; return whether it is time to write."""
        self._cycles += 1
        if self._cycles < self._due:
            return False
        self._due += min(self._cycles, KEPT_EVERY)
        return True

    def keep(self, remembered: Remembered) -> None:
        """Write the file."""
        self.store("remembered", asdict(remembered))


def _digest(drafter: Drafter) -> str:
    """Identify the weights of a head by the first numbers of each tensor."""
    first = [] if drafter.net is None else [p.detach().flatten()[:8].tolist() for p in drafter.net.parameters()]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]


log = logging.getLogger(__name__)  # the command line shows its messages

CHECKED_CYCLES = 200  # drafted cycles after which the head is judged, once
MIN_SHARE = 0.5  # of what its training measured


def first_chance(drafter: Drafter) -> float:
    """Return `trained_chance` for a plan: PRIOR_CHANCE where it is unknown, and neither 0 nor 1."""
    chance = trained_chance(drafter)
    return PRIOR_CHANCE if chance is None else min(0.98, max(0.02, chance))  # on few texts it may be 0 or 1


def trained_chance(drafter: Drafter) -> float | None:
    """Return the share of first draft tokens that the target accepted on held-out texts, by the `training.json`
    in the head's folder. Return None if the folder has no such file, or the file no such number."""
    source = getattr(drafter, "source", None)
    if source is None:
        return None
    try:
        record = parse_json((Path(source).expanduser() / "training.json").read_bytes())
        return float(record["heldout"]["0-alpha"])
    except (OSError, InputError, LookupError, TypeError, ValueError):
        return None


class AcceptanceCheck:
    """Warns once of a head that accepts less than half of the share that its training measured: it belongs to
    another model, or an input of it has changed.

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
