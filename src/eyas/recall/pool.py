"""A bounded pool of token texts, in which the end of a text is found again.

Every run of GRAM tokens of a text is a key of one dictionary, whose entry is the last places where it
occurs. A place is found in one step, and the tokens before it are compared one by one, which gives the
length of the match. Texts leave the pool when it is full, the least recently used first, or when they are too
old; their places leave the dictionary with them.

This module knows no request and no tree.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eyas.drafters.tools import MatchRates
from eyas.errors import InputError
from eyas.files import write_atomically

__all__ = ["Match", "Pool"]

GRAM = 4  # tokens of a key: shorter matches are right too seldom
MAX_PLACES = 4  # places that are kept of one key, the latest
MAX_MATCH = 32  # tokens before a place that are compared
BYTES_PER_TOKEN = 256  # what a token takes with its entry in the dictionary, as measured by tests/recall
MAX_TEXT = 2**20  # tokens of one text; a longer one is cut into several


class Match(NamedTuple):
    """A place in the pool before which the same tokens stand as at the end of a text."""

    text: array[int]
    place: int  # of the token that comes next
    length: int  # how many tokens before it are equal, MAX_MATCH at most


class Pool:
    """Texts of token ids. Threads may share it.

    Args:
        max_bytes: memory that it takes at most.
        max_age: seconds after which a text that was not used is forgotten; None: never.
        now: the clock.
    """

    def __init__(
        self, max_bytes: int = 64 * 2**20, max_age: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_tokens = max_bytes // BYTES_PER_TOKEN
        if self.max_tokens < GRAM:
            raise InputError(f"a pool of {max_bytes} bytes holds no text: give at least {GRAM * BYTES_PER_TOKEN}")
        self.max_age = max_age
        self.rates = MatchRates()  # how often matches of each length were right
        self.tokens = 0  # of all texts
        self._now = now
        self._texts: OrderedDict[int, tuple[array[int], float]] = OrderedDict()  # least recently used first
        self._number_of: dict[bytes, int] = {}  # a text's bytes -> its number
        # bytes of a run of tokens -> the places behind it, each as text number * MAX_TEXT + place: numbers take least
        self._places: dict[bytes, tuple[int, ...]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text. A text that is there already becomes the most recent one."""
        for start in range(0, len(tokens), MAX_TEXT):
            with self._lock:
                self._add(array("i", tokens[start : start + MAX_TEXT][: self.max_tokens]))

    def _add(self, text: array[int]) -> None:
        if len(text) <= GRAM:
            return
        key = text.tobytes()
        if key in self._number_of:
            self._use(self._number_of[key])
            return
        self._next += 1
        number = self._number_of[key] = self._next
        self._texts[number] = text, self._now()
        self.tokens += len(text)
        for place in range(GRAM, len(text)):
            run = text[place - GRAM : place].tobytes()
            self._places[run] = (number * MAX_TEXT + place, *self._places.get(run, ())[: MAX_PLACES - 1])
        self._make_room()

    def _use(self, number: int) -> None:
        self._texts[number] = self._texts[number][0], self._now()
        self._texts.move_to_end(number)

    def _make_room(self) -> None:
        """Forget the least recently used texts, while there is too much, or they are too old."""
        while self._texts:
            number, (text, used) = next(iter(self._texts.items()))
            is_old = self.max_age is not None and self._now() - used > self.max_age
            if not is_old and self.tokens <= self.max_tokens:
                return
            del self._texts[number], self._number_of[text.tobytes()]
            self.tokens -= len(text)
            for place in range(GRAM, len(text)):
                self._drop(text[place - GRAM : place].tobytes(), number)

    def _drop(self, run: bytes, number: int) -> None:
        left = tuple(entry for entry in self._places.get(run, ()) if entry // MAX_TEXT != number)
        if left:
            self._places[run] = left
        else:
            self._places.pop(run, None)

    def matches(self, tokens: Sequence[int]) -> list[Match]:
        """Return the places where the end of `tokens` occurs, the longest match first, of equals the latest."""
        with self._lock:
            self._make_room()
            run = array("i", tokens[-GRAM:]).tobytes()
            found = list[Match]()
            for entry in self._places.get(run, ()):
                number, place = divmod(entry, MAX_TEXT)
                text = self._texts[number][0]
                found.append(Match(text, place, _common_end(text, place, tokens)))
                self._use(number)
        return sorted(found, key=lambda match: -match.length)

    def texts(self) -> Iterator[list[int]]:
        """Yield the texts, the least recently used first."""
        with self._lock:
            texts = [text.tolist() for text, _ in self._texts.values()]
        yield from texts

    def save(self, file: Path) -> None:
        """Write the texts to a file, so that they outlast the process."""
        texts = list(self.texts())
        ids = np.array([token for text in texts for token in text], dtype=np.int32)
        with write_atomically(file) as stream:
            np.savez_compressed(stream, ids=ids, lengths=np.array([len(text) for text in texts], dtype=np.int64))

    def load(self, file: Path) -> None:
        """Add the texts of a file that `save` has written. Raise InputError if it is something else."""
        try:
            with np.load(file, allow_pickle=False) as kept:
                texts = np.split(kept["ids"], np.cumsum(kept["lengths"])[:-1]) if len(kept["lengths"]) else []
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise InputError(f"{file} is not a pool of texts ({error}): delete it, or name another file") from error
        for text in texts:
            self.add(text.tolist())


def _common_end(text: array[int], place: int, tokens: Sequence[int]) -> int:
    length, limit = GRAM, min(place, len(tokens), MAX_MATCH)
    while length < limit and text[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
