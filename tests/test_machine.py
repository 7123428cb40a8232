"""The warning that others used the machine."""

import psutil
import pytest

from eyas.hardware import machine
from eyas.hardware.machine import Snapshot, Used, busy, snapshot, used

BEFORE = Snapshot(seconds=100.0, all_seconds=1000.0, own_seconds=50.0, load=0.5)


def after(seconds: float, everybody: float, own: float) -> Snapshot:
    """The clocks so much later."""
    return Snapshot(100.0 + seconds, 1000.0 + everybody, 50.0 + own, 0.5)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: [0, 1, 2, 3])


@pytest.mark.usefixtures("four_cores")
def test_our_own_work_is_not_somebody_elses() -> None:
    """Bug: a bench that keeps every core busy warns of itself."""
    assert used(BEFORE, after(10, everybody=44.5, own=40)) == Used(10.0, 4.5)
    assert busy(Used(10, 0.3), 4) is None
    assert busy(Used(10, 3), 4) is None  # 0.3 of 4 cores
    assert "0.5 of 4 cores" in str(busy(Used(10, 4.6), 4))


@pytest.mark.usefixtures("four_cores")
def test_taken_cores_are_told_from_shared_caches() -> None:
    """Bug: one line for a machine that was full and for one with cores to spare."""
    full, shared = busy(Used(10, 20), 3), busy(Used(10, 20), 2)
    assert full is not None
    assert shared is not None
    assert "2.0 of 4 cores meanwhile, in addition to 3 threads" in full
    assert "2.0 of 4 cores meanwhile: caches" in shared


def test_a_system_that_hides_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in a container without /proc/stat, or that shows fewer cores than may be used, a snapshot is a traceback."""

    def hidden(percpu: bool) -> list[object]:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert snapshot().all_seconds is None
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [])
    assert snapshot().all_seconds is None
