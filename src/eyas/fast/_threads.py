"""How many threads a pass uses: as many as make it fastest, and one for a while when others take the cores away.

Threads wait for each other some eighty times a pass. Where another process runs on one of the cores, each of those waits can last until the
system gives the core back, and a pass of 3 ms takes 200. So passes are watched, by kind: a few that take several times what is usual there,
and the next ones run on one thread; after a while all are tried again. Which thread sums what does not matter to the results.

This module knows no model.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Threads"]

SLOW = 3.0  # times the usual
STRIKES = 3.0  # slow passes, each usual one between them taking back a quarter
FORGET = 1.01  # the usual time is the shortest seen, and grows by this with every pass: texts become longer, clocks slower
REST, LONGEST_REST = 2.0, 60.0  # seconds on one thread


class Threads:
    """Decides before each pass, and learns from each.

    Args:
        most: threads where nothing is in the way.
    """

    def __init__(self, most: int) -> None:
        self.most, self.strikes, self.rest = most, 0.0, REST
        self.until = -1.0  # when one thread's time is over
        self._usual: dict[Hashable, float] = {}

    def now(self, clock: float) -> int:
        """Threads for a pass that begins now."""
        return 1 if clock < self.until else self.most

    def learn(self, kind: Hashable, began: float, ended: float) -> None:
        """What a pass took that `now` was asked for when it began. kind: passes that take as long as each other."""
        if self.most == 1 or began < self.until:
            return
        took, usual = ended - began, self._usual.get(kind)
        self._usual[kind] = took if usual is None else min(took, usual * FORGET)
        if usual is None or took < SLOW * usual:
            self.strikes = max(0.0, self.strikes - 0.25)
            if not self.strikes:
                self.rest = max(REST, self.rest / 1.001)
            return
        self.strikes += 1
        if self.strikes >= STRIKES:
            self.strikes, self.until = 0.0, ended + self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
