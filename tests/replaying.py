"""A capture without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from eyas.runners.graphs import tensors_of

T = TypeVar("T")


def again(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
    """Like a graph: what it leaves lies where it lay the first time, and everything comes from the inputs that it was captured with."""
    found = work()
    undo()

    def replay() -> None:
        for mine, new in zip(tensors_of(found), tensors_of(work()), strict=True):
            if mine.data_ptr() != new.data_ptr():
                mine.copy_(new)

    return found, replay
