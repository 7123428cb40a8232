"""Chooses the number of threads of each forward: the fastest number, or one while other processes
use the cores.

The threads of a forward wait for each other some eighty times. If another process runs on one of
the cores, each wait can last until the system gives the core back, and a forward of 3 ms takes 200
ms. So forwards are timed, by kind. After a few that take several times as long as usual for their
kind, forwards run on one thread for some seconds; then all threads are tried again. Conversely, the number may
have been chosen while another process was running. So now and then a forward tries twice as many threads. If
that is faster several times in a row, the number stays doubled. Results do not depend on the number of threads.

This module knows no model.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Threads"]

SLOW = 3.0  # a forward is slow if it takes this many times the usual time
# slow forwards after which one thread is used; each usual forward between them takes back a quarter of one
SLOW_LIMIT = 3.0
# With every forward the usual time, which is the shortest one, is multiplied by this: texts become
# longer, and clocks slower.
FORGET = 1.01
SINGLE_THREAD_SECONDS, MAX_SINGLE_THREAD_SECONDS = 2.0, 60.0  # time on one thread: at first, and at most
TRIAL_INTERVAL = 32  # forwards from one that tries twice the threads to the next
# the number is doubled after this many trials in a row that took less than this share of the usual time
FASTER, WINS_TO_DOUBLE = 0.9, 3


class Threads:
    """Chooses the number of threads before each forward, and learns from its time.

    Args:
        max_threads: number of threads while no other process uses the cores.
        ceiling: largest number to try; default: `max_threads`.
    """

    def __init__(self, max_threads: int, ceiling: int = 0) -> None:
        self.max_threads, self.ceiling = max_threads, max(max_threads, ceiling)
        self.strikes, self.rest = 0.0, SINGLE_THREAD_SECONDS
        self.until = -1.0  # the time until which one thread is used
        self._usual: dict[Hashable, float] = {}
        self._passes, self._wins = 0, 0

    def now(self, clock: float) -> int:
        """Return the number of threads for work outside of a forward, at this time."""
        return 1 if clock < self.until else self.max_threads

    def next(self, clock: float) -> int:
        """Return the number of threads for the forward that begins at this time."""
        self._passes += 1
        return min(2 * self.max_threads, self.ceiling) if self._tries(clock) else self.now(clock)

    def _tries(self, began: float) -> bool:
        return began >= self.until and self.max_threads < self.ceiling and self._passes % TRIAL_INTERVAL == 0

    def learn(self, kind: Hashable, began: float, ended: float) -> None:
        """Learn from a forward, for which `next` was called when it began. `kind`: forwards of one
        kind take equally long."""
        took, usual = ended - began, self._usual.get(kind)
        if began < self.until:
            return
        if self._tries(began):
            self._wins = self._wins + 1 if usual is not None and took < FASTER * usual else 0
            if self._wins >= WINS_TO_DOUBLE:
                self.max_threads, self._wins = min(2 * self.max_threads, self.ceiling), 0
                self._usual.clear()
            return
        self._usual[kind] = took if usual is None else min(took, usual * FORGET)
        if self.max_threads == 1:
            return
        if usual is None or took < SLOW * usual:
            self.strikes = max(0.0, self.strikes - 0.25)
            if not self.strikes:
                self.rest = max(SINGLE_THREAD_SECONDS, self.rest / 1.001)
            return
        self.strikes += 1
        if self.strikes >= SLOW_LIMIT:
            self.strikes, self.until = 0.0, ended + self.rest
            self.rest = min(2 * self.rest, MAX_SINGLE_THREAD_SECONDS)
