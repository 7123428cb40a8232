"""Keeps how a head's drafts were accepted, and how many tokens they brought, from one process to the next: a small file
in the user's cache folder for each target, head, format and machine.

Without it, each process finds out again in its first hundreds of cycles whether drafts pay and which trees do. A file that
is missing, damaged or of another key counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.adaptive.cost import cost_key
from eyas.core.drafter import Drafter
from eyas.files import parse_json, user_cache, write_atomically

__all__ = ["Memory", "Remembered"]

FORMAT = 1  # files of another version are not read
FIRST_KEPT, KEPT_EVERY = 64, 1024  # cycles until the file is first written; from then on twice as many, at most so many


@dataclass(frozen=True)
class Remembered:
    """What a controller knew when it last wrote."""

    trees: tuple[tuple[float, ...], ...] = ()  # `Acceptance.sums`; empty: the method grows no trees
    tokens: tuple[
        tuple[int, float], ...
    ] = ()  # range of numbers of rows; tokens of a cycle and row in which the method drafted

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


class Memory:
    """The file of one drafter."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.key = path, key
        self._cycles, self._due = 0, FIRST_KEPT

    @classmethod
    def of(cls, drafter: Drafter) -> Memory:
        """Return the file for this target, head, format and machine."""
        key = cost_key(drafter) | {"memory": FORMAT, "weights": _digest(drafter)}
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(user_cache() / f"paid-{name}.json", key)

    def read(self) -> Remembered | None:
        """Return what was kept; None without a file that can be used."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = parse_json(self.path.read_bytes())
            return Remembered.from_json(content["remembered"]) if content["key"] == self.key else None
        return None

    def is_due(self) -> bool:
        """Count one more cycle; return whether it is time to write."""
        self._cycles += 1
        if self._cycles < self._due:
            return False
        self._due += min(self._cycles, KEPT_EVERY)
        return True

    def keep(self, remembered: Remembered) -> None:
        """Write the file. Where that is not possible, the next process begins anew."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(self.path) as stream:
                stream.write((json.dumps({"key": self.key, "remembered": asdict(remembered)}) + "\n").encode())


def _digest(drafter: Drafter) -> str:
    """Identify the weights of a head by the first numbers of each tensor."""
    first = [] if drafter.net is None else [p.detach().flatten()[:8].tolist() for p in drafter.net.parameters()]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]
