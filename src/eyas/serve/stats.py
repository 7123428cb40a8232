"""Figures of the last ten seconds as one JSON object for the page."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Any, NamedTuple

from eyas.serve.records import CycleFigures, Delta

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
        """Throughput, tau, acceptance by depth and what was drafted in these seconds."""
        now = time.monotonic()
        with self._lock:
            self._forget(now)
            moments = list(self._moments)
        cycles = [cycle for moment in moments for cycle in moment.cycles]
        drafts = [cycle for cycle in cycles if cycle.drafted]
        deepest = max((cycle.accepted for cycle in drafts), default=0)
        seconds = min(WINDOW_SECONDS, max(now - self._started, 1e-3))
        return {
            "seconds": seconds,
            "tokens_per_second": sum(moment.tokens for moment in moments) / seconds,
            "cycles": len(cycles),
            "tau": sum(cycle.emitted for cycle in cycles) / len(cycles) if cycles else None,
            "mean_cycle_ms": 1000 * sum(cycle.seconds for cycle in cycles) / len(cycles) if cycles else None,
            "accepted_by_depth": [
                sum(cycle.accepted > depth for cycle in drafts) / len(drafts) for depth in range(deepest)
            ],
            "decisions": dict(Counter(cycle.plan for cycle in cycles)),
        }

    def _forget(self, now: float) -> None:
        while self._moments and self._moments[0].at < now - WINDOW_SECONDS:
            self._moments.popleft()
