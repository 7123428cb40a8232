"""Fewer members of a matrix of methods and conditions, of which each still occurs.

A mistake is nearly always one of a method, of a condition, or of the two together; seldom does it need a third
condition as well. So a test with several lists need not try every combination of them.

    turn     each name gets one of the settings, neighbours get different ones: every setting meets many names
    pairs    a few combinations in which every two values of different lists come together at least once
    wanted   the values that `make test` runs of a matrix: all of them, or of a long list a share
    cover    a few cases of a matrix in which each wanted value occurs at least once
"""

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

__all__ = ["cover", "pairs", "turn", "wanted"]

T = TypeVar("T")
Case = Mapping[str, str]  # a value for each axis of a matrix


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


def wanted(test: str, cases: Sequence[Case], shares: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return the (axis, value) that a cover of the cases must hold: each value of each axis; of an axis in `shares` as
    many values as it says, evenly spread. Where they begin follows from the name of the test, so that tests with
    the same axis have different shares of it: together they have all of it, many times."""
    values = {axis: list(dict.fromkeys(case[axis] for case in cases)) for axis in cases[0]}
    for axis, count in shares.items():
        names, start = values[axis], zlib.crc32(test.encode())
        if count < len(names):
            values[axis] = [names[(start + i * len(names) // count) % len(names)] for i in range(count)]
    return {(axis, value) for axis, names in values.items() for value in names}


def cover(cases: Sequence[Case], goal: Collection[tuple[str, str]], chosen: Collection[int] = ()) -> set[int]:
    """Return places of cases that hold the whole goal, chosen greedily: the same ones in every run.

    `chosen` are places that are taken anyway. Of cases that bring equally many values the one whose values have
    occurred least is taken, then the first.
    """
    places, occurred = set(chosen), Counter(pair for place in chosen for pair in cases[place].items())
    missing = set(goal) - set(occurred)

    def merit(place: int) -> tuple[int, int]:
        row = cases[place].items()
        return len(missing & row), -sum(occurred[pair] for pair in row)

    while missing:
        best = max(range(len(cases)), key=merit)
        missing -= cases[best].items()
        occurred.update(cases[best].items())
        places.add(best)
    return places
