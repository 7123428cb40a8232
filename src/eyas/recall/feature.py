"""The pool of earlier texts, and the request feature that drafts from it and adds the answer to it.

Every run of GRAM tokens of a text is a key of one dictionary, whose entry is the last places where it
occurs. A place is found in one step, and the tokens before it are compared one by one, which gives the
length of the match. Texts leave the pool when it is full, the least recently used first, or when they are too
old; their places leave the dictionary with them.

The answer is followed through the pool: while the place that was found goes on like the answer, nothing is
looked up. The share of right matches of each length is counted over the requests of a pool (`MatchRates`), so
its own texts decide the chances of its guesses. As with all guesses from the text, nodes that are not worth
their time in the target's pass are left out.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eyas.core.features import Guess, RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Cycle
from eyas.drafters.tools import MatchRates
from eyas.errors import InputError
from eyas.files import write_atomically

__all__ = ["Match", "Pool", "Pools", "Recalled"]

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
            raise InputError(f"{file} is not a pool of texts ({error}): delete it, or use another file") from error
        for text in texts:
            self.add(text.tolist())


def _common_end(text: array[int], place: int, tokens: Sequence[int]) -> int:
    length, limit = GRAM, min(place, len(tokens), MAX_MATCH)
    while length < limit and text[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


CONTEXT = MAX_MATCH  # tokens of the prompt's end that are kept before the answer, so that its beginning is found


@dataclass(frozen=True)
class Recalled(RequestFeature):
    """The pool that a request drafts from.

    Attributes:
        keeps: whether the answer is added to the pool.
    """

    pool: Pool
    keeps: bool = True

    def add(self, tokens: Sequence[int]) -> None:
        """Put the tokens of an answer into the pool."""
        self.pool.add(tokens)

    def open(self, request: Request, target: Target) -> RowFeature:
        return _Row(self, request.prompt)


class _Row(RowFeature):
    """One row's text, and the places in the pool that it follows."""

    def __init__(self, recalled: Recalled, prompt: Sequence[int]) -> None:
        self.pool, self.keeps = recalled.pool, recalled.keeps
        self.text = list(prompt[-CONTEXT:])
        self.matches = self.pool.matches(self.text)

    def accept(self, token: int) -> bool:
        if self.matches:
            best = self.matches[0]
            self.pool.rates.count(best.length, best.text[best.place] == token)
        self.text.append(token)
        self.matches = [
            Match(text, place + 1, min(length + 1, MAX_MATCH))
            for text, place, length in self.matches
            if text[place] == token and place + 1 < len(text)
        ] or self.pool.matches(self.text)
        return False

    def guesses(self, own: list[Guess], depth: int, least: float) -> list[Guess]:
        """Return the guesses from the row's own text and from the pool.

        Whose first token is more certain comes first; the others count for the cases in which it is wrong.
        """
        if not self.matches:
            return own
        certain = self.pool.rates.chance(self.matches[0].length)
        own_certain = max((math.exp(guess.logp) for guess in own if guess.parent == 0), default=0.0)
        others, first = math.log(1 - certain), {match.text[match.place] for match in self.matches}
        left = 1.0 if certain >= own_certain else 1 - own_certain
        found = [
            guess._replace(logp=guess.logp + others)
            if left == 1 and guess.parent == 0 and guess.token not in first
            else guess
            for guess in own
        ]
        for match in self.matches:
            self._add_chain(found, match, left, depth, least)
            left *= 1 - self.pool.rates.chance(match.length)
        return found

    def _add_chain(self, guesses: list[Guess], match: Match, chance: float, depth: int, least: float) -> None:
        """Add the tokens that follow a match, one below the other, while their path's chance is `least` or more."""
        known = {(guess.parent, guess.token): node for node, guess in enumerate(guesses, start=1)}
        node, logp = 0, math.log(chance)
        for n, token in enumerate(match.text[match.place : match.place + depth]):
            each = self.pool.rates.chance(match.length + n)
            chance *= each
            if chance < least:
                return
            logp += math.log(each)
            place = known.get((node, token))
            if place is None:
                guesses.append(Guess(node, token, logp))
                place = len(guesses)
            elif guesses[place - 1].logp < logp:
                guesses[place - 1] = guesses[place - 1]._replace(logp=logp)
            node, logp = place, 0.0

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        """Add the answer to the pool when it ends."""
        if finish in ("stop", "length") and self.keeps:
            self.pool.add(self.text)
        return {}


class Pools:
    """The pools of all owners of requests, such as API keys: nobody is drafted from another's texts.

    Args:
        max_bytes: memory of one pool.
        max_age: see `Pool`.
        max_owners: how many pools there are; the least recently used one leaves for a new owner.
        shared: all owners have the same pool.
        folder: where pools are kept, one file each, when they leave and when `save` is called; None: nowhere.
    """

    def __init__(
        self,
        max_bytes: int = 64 * 2**20,
        max_age: float | None = None,
        max_owners: int = 16,
        shared: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.max_bytes, self.max_age, self.max_owners = max_bytes, max_age, max_owners
        self.shared, self.folder = shared, folder
        self._pools: OrderedDict[str, Recalled] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def __getitem__(self, owner: str) -> Recalled:
        """Return the request feature with the pool of an owner, which is made, or read, when it is first asked for."""
        owner = "" if self.shared else owner
        with self._lock:
            if owner not in self._pools:
                self._pools[owner] = Recalled(self._opened(owner))
                while len(self._pools) > self.max_owners:
                    self._save(*self._pools.popitem(last=False))
            self._pools.move_to_end(owner)
            return self._pools[owner]

    def _opened(self, owner: str) -> Pool:
        pool = Pool(self.max_bytes, self.max_age)
        if self.folder is not None and (file := self._file(owner)).exists():
            pool.load(file)
        return pool

    def _file(self, owner: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}.npz"  # names say nothing about keys

    def _save(self, owner: str, recalled: Recalled) -> None:
        if self.folder is not None:
            recalled.pool.save(self._file(owner))

    def save(self) -> None:
        """Write all pools to the folder, if there is one."""
        with self._lock:
            for owner, recalled in self._pools.items():
                self._save(owner, recalled)
