"""Fewer members of a matrix of methods and conditions, of which each still occurs.

A mistake is nearly always one of a method, of a condition, or of the two together; seldom does it need a third
condition as well. So a test with several lists need not try every combination of them.

    turn     each name gets one of the settings, neighbours get different ones: every setting meets many names
    pairs    a few combinations in which every two values of different lists come together at least once
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, TypeVar

__all__ = ["pairs", "turn"]

T = TypeVar("T")


def turn(name: str, names: Sequence[str], settings: Sequence[T], offset: int = 0) -> T:
    """Return the setting of a name: the first name gets the first one, the next name the next one, and round again."""
    return settings[(list(names).index(name) + offset) % len(settings)]


def pairs(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that hold every pair of values of two lists, chosen greedily: the same ones in every run."""
    columns = list(combinations(range(len(lists)), 2))

    def held(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in columns}

    rows = list(product(*(range(len(values)) for values in lists)))
    missing, chosen = set[tuple[int, int, int, int]]().union(*map(held, rows)), list[tuple[Any, ...]]()
    while missing:
        best = max(rows, key=lambda row: len(held(row) & missing))
        missing -= held(best)
        chosen.append(tuple(values[i] for values, i in zip(lists, best, strict=True)))
    return chosen
