"""The request feature that drafts from a pool, and adds the answer to it.

The answer is followed through the pool: while the place that was found goes on like the answer, nothing is
looked up. How often matches of each length were right is counted over the requests of a pool
(`MatchRates`), so the chances of its guesses are those of its own texts, and what is not worth its time in the
target's pass is left out as with all guesses from the text.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.core.features import Guess, RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Cycle
from eyas.recall.pool import MAX_MATCH, Match, Pool

__all__ = ["Pools", "Recalled"]

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
        """Add a text to the pool."""
        self.pool.add(tokens)

    def open(self, request: Request, target: Target) -> RowFeature:
        """See `RequestFeature`."""
        return _Row(self, request.prompt)


class _Row(RowFeature):
    """One row's text, and the places in the pool that it follows."""

    def __init__(self, recalled: Recalled, prompt: Sequence[int]) -> None:
        self.pool, self.keeps = recalled.pool, recalled.keeps
        self.text = list(prompt[-CONTEXT:])
        self.matches = self.pool.matches(self.text)

    def accept(self, token: int) -> bool:
        """Follow the answer."""
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
        """Return the guesses of the row's own text, and those of the pool.

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
