"""Ctrl-C at a chosen line of eyas: KeyboardInterrupt from a trace function, as a signal's handler raises it."""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import eyas

SOURCE = str(Path(eyas.__file__).parent)


def leaves_a_block(frame: FrameType) -> bool:
    """Whether a `with` may be about to call __exit__: no signal's handler runs there, but a trace function does."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


@contextmanager
def interrupted_at(line: int, places: dict[tuple[str, int], list[int]] | None = None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt when so many lines of eyas have begun within this context; 0: never. Yield the number of
    lines so far. Finalisers are left alone: Python swallows what they raise.

    Args:
        places: is filled with the numbers at which each line of a function began.
    """
    begun = [0]

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            begun[0] += 1
            if places is not None:
                places.setdefault((frame.f_code.co_qualname, frame.f_lineno), []).append(begun[0])
            if 0 < line <= begun[0] and not leaves_a_block(frame):
                sys.settrace(None)
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(SOURCE) and frame.f_code.co_name != "__del__"
        return on_line if ours else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield begun
    finally:
        sys.settrace(before)


def interrupt(do: Callable[[], object], line: int) -> bool:
    """Do something until this line; return whether it was interrupted."""
    try:
        with interrupted_at(line):
            do()
    except KeyboardInterrupt:
        return True
    return False


def lines_of(do: Callable[[], object]) -> int:
    """Return how many lines of eyas something takes."""
    with interrupted_at(0) as begun:
        do()
    return begun[0]


def lines_in(do: Callable[[], object], *functions: str) -> list[int]:
    """The numbers, among all lines of eyas, at which lines of functions with such names begin."""
    places: dict[tuple[str, int], list[int]] = {}
    with interrupted_at(0, places):
        do()
    found = [numbers for (name, _), numbers in places.items() if name.startswith(functions)]
    return sorted(number for numbers in found for number in numbers)
