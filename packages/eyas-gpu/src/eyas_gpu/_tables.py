"""Cosines and sines by position."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["RotaryTables"]

MIN_POSITIONS = 4096  # positions of the first tables, if the text may have as many


class RotaryTables:
    """Tables of cosines and sines [P, h / 2], which grow with the text.

    Args:
        make: number of positions -> the tables.
        most: the largest number of positions that is needed.
    """

    def __init__(self, make: Callable[[int], tuple[Tensor, Tensor]], most: int) -> None:
        self.make, self.most = make, most
        self._tables: list[tuple[Tensor, Tensor]] = []  # older ones are kept, as recorded graphs read them

    def __call__(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables of at least this many positions."""
        known = len(self._tables[-1][0]) if self._tables else 0
        if positions > known:
            cosine, sine = self.make(max(positions, min(self.most, max(2 * known, MIN_POSITIONS))))
            self._tables.append((cosine.contiguous(), sine.contiguous()))
        return self._tables[-1]
