"""Whether other processes used the machine that numbers come from.

    before = snapshot()
    ...                                             the measurement
    busy(used(before), threads)                     a warning, or None

CPU time of others: the time of the cores which this process may use, less the time of this process and its
children. A limit in CPU seconds that a container sets (a quota) is not seen. This module knows no model, no
task and no metric.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import NamedTuple

import psutil

__all__ = ["Snapshot", "Used", "busy", "cores", "snapshot", "used"]

MUCH = 0.1  # share of the cores that others may use without a warning
SHORTEST_SECONDS = 0.5  # the system counts CPU time in hundredths of a second: shorter stretches say nothing
IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are counted in user time already


@dataclass(frozen=True)
class Snapshot:
    """The clocks at one moment. Only differences of two have a meaning."""

    seconds: float  # a clock's time
    all_seconds: float | None  # CPU time of all processes, on the cores that we may use; None: unknown
    own_seconds: float  # CPU time of this process and its children
    load: float | None  # processes that ran or waited, over the last minute; None: unknown


def snapshot() -> Snapshot:
    """Return the clocks now."""
    return Snapshot(
        time.monotonic(), _all_seconds(), _own_seconds(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    )


class Used(NamedTuple):
    """CPU use over a stretch of time, or over several together."""

    seconds: float  # of a clock
    others: float | None  # CPU seconds that other processes used meanwhile, of the cores that we may use; None: unknown

    @property
    def share(self) -> float:
        """The share of these cores' time that others used; 0 where it is unknown."""
        if self.others is None or self.seconds < SHORTEST_SECONDS:
            return 0.0
        return max(0.0, self.others / self.seconds / len(cores()))


def used(before: Snapshot, after: Snapshot | None = None) -> Used:
    """CPU use from `before` until `after`, or until now."""
    after = after or snapshot()
    seconds = after.seconds - before.seconds
    if before.all_seconds is None or after.all_seconds is None:
        return Used(seconds, None)
    return Used(seconds, after.all_seconds - before.all_seconds - (after.own_seconds - before.own_seconds))


def busy(meanwhile: Used, threads: int) -> str | None:
    """A warning when other processes used much CPU; None when they did not, or when it is unknown.

    Args:
        threads: the number of this process's threads.
    """
    if meanwhile.others is None or meanwhile.seconds < SHORTEST_SECONDS:
        return None
    there, others = len(cores()), meanwhile.others / meanwhile.seconds
    if others < MUCH * there:
        return None
    took = f"other processes used {others:.1f} of {there} cores meanwhile"
    if others + threads <= there:
        return f"{took}: caches, memory and clock are shared, so the times may be too long"
    ours = f"{threads} thread{'s' * (threads > 1)} of ours"
    return f"{took}, in addition to {ours}: the times are too long, measure again when the machine is idle"


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _all_seconds() -> float | None:
    try:
        times = psutil.cpu_times(percpu=True)
        ours = [times[core] for core in cores()]
    except (OSError, IndexError, NotImplementedError, psutil.Error):  # a container may hide /proc/stat, or cores of it
        return None
    return float(sum(value for core in ours for name, value in core._asdict().items() if name not in IDLE))


def _own_seconds() -> float:
    """CPU seconds of this process, of children that have ended, and of those that run."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended meanwhile, or may not be asked
            continue
        total += (
            times.user + times.system + getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        )
    return float(total)
