"""How many threads a pass uses: as many as make it fastest, and one for a while when others take the cores away.

Threads wait for each other some eighty times a pass. Where another process runs on one of the cores, each of those waits can last until the
system gives the core back, and a pass of 3 ms takes 200. So passes are watched, by kind: a few that take several times what is usual there,
and the next ones run on one thread; after a while all are tried again. The other way round, fewer than there could be were perhaps chosen
while something else was running: now and then a pass tries twice as many, and where that is faster again and again they stay. Which thread
sums what does not matter to the results.

This module knows no model.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Threads"]

SLOW = 3.0  # times the usual
STRIKES = 3.0  # slow passes, each usual one between them taking back a quarter
FORGET = 1.01  # the usual time is the shortest seen, and grows by this with every pass: texts become longer, clocks slower
REST, LONGEST_REST = 2.0, 60.0  # seconds on one thread
EVERY, FASTER, WINS = 32, 0.9, 3  # each such pass tries more threads; of the usual time; trials in a row


class Threads:
    """Decides before each pass, and learns from each.

    Args:
        most: threads where nothing is in the way, as far as is known.
        ceiling: how many there could be; default: no more.
    """

    def __init__(self, most: int, ceiling: int = 0) -> None:
        self.most, self.ceiling = most, max(most, ceiling)
        self.strikes, self.rest = 0.0, REST
        self.until = -1.0  # when one thread's time is over
        self._usual: dict[Hashable, float] = {}
        self._passes, self._wins = 0, 0

    def now(self, clock: float) -> int:
        """Threads for what is computed now, beside a pass."""
        return 1 if clock < self.until else self.most

    def next(self, clock: float) -> int:
        """Threads for a pass that begins now."""
        self._passes += 1
        return min(2 * self.most, self.ceiling) if self._tries(clock) else self.now(clock)

    def _tries(self, began: float) -> bool:
        return began >= self.until and self.most < self.ceiling and self._passes % EVERY == 0

    def learn(self, kind: Hashable, began: float, ended: float) -> None:
        """What a pass took that `next` was asked for when it began. kind: passes that take as long as each other."""
        took, usual = ended - began, self._usual.get(kind)
        if began < self.until:
            return
        if self._tries(began):
            self._wins = self._wins + 1 if usual is not None and took < FASTER * usual else 0
            if self._wins >= WINS:
                self.most, self._wins = min(2 * self.most, self.ceiling), 0
                self._usual.clear()
            return
        self._usual[kind] = took if usual is None else min(took, usual * FORGET)
        if self.most == 1:
            return
        if usual is None or took < SLOW * usual:
            self.strikes = max(0.0, self.strikes - 0.25)
            if not self.strikes:
                self.rest = max(REST, self.rest / 1.001)
            return
        self.strikes += 1
        if self.strikes >= STRIKES:
            self.strikes, self.until = 0.0, ended + self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
