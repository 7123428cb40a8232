"""Figures of the last ten seconds as one JSON object for the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

from eyas.metrics import tau
from eyas.serve.records import CycleFigures, CycleSums, Delta

__all__ = ["RecentTokens"]

WINDOW_SECONDS = 10.0


class Moment(NamedTuple):
    """One Delta as numbers."""

    at: float
    tokens: int
    cycles: tuple[CycleFigures, ...]


class RecentTokens:
    """The Deltas of the last ten seconds, as numbers. May be used by several threads."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def add(self, now: float, delta: Delta) -> None:
        """Count a Delta."""
        with self._lock:
            self._moments.append(Moment(now, len(delta.token_ids), delta.cycles))
            self._forget(now)

    def summary(self) -> dict[str, Any]:
        """Return throughput, tau, acceptance by depth and what was drafted in these seconds."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            moments = list(self._moments)
        sums = CycleSums.from_cycles([cycle for moment in moments for cycle in moment.cycles])
        seconds = min(WINDOW_SECONDS, max(now - self._started, 1e-3))
        return {
            "seconds": seconds,
            "tokens_per_second": sum(moment.tokens for moment in moments) / seconds,
            "cycles": sums.cycles,
            "tau": tau(sums.emitted, sums.cycles) if sums.cycles else None,
            "mean_cycle_ms": 1000 * sums.seconds / sums.cycles if sums.cycles else None,
            "accepted_by_depth": [count / sums.drafts for count in sums.accepted_at],
            "decisions": dict(sums.plans),
        }

    def _forget(self, now: float) -> None:
        while self._moments and self._moments[0].at < now - WINDOW_SECONDS:
            self._moments.popleft()
