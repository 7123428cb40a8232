"""The warning that others used the machine."""

import subprocess
import sys
import time
from dataclasses import replace

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


@pytest.mark.usefixtures("four_cores")
def test_what_cannot_be_known_is_no_warning() -> None:
    """Bug: a system without the counters, or half a second of them, ends a bench or warns at random."""
    silent = replace(BEFORE, all_seconds=None)
    assert used(silent, after(10, everybody=40, own=0)) == Used(10.0, None)
    assert used(BEFORE, replace(silent, seconds=110.0)) == Used(10.0, None)
    assert busy(Used(10, None), 4) is None
    assert busy(Used(0.1, 0.4), 4) is None


def test_a_system_that_hides_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: in a container without /proc/stat, or that shows fewer cores than may be used, a snapshot is a traceback."""

    def hidden(percpu: bool) -> list[object]:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert snapshot().all_seconds is None
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [])
    assert snapshot().all_seconds is None


@pytest.mark.slow
def test_a_snapshot_counts_us_and_our_children() -> None:
    """Bug: the work of a worker process counts as somebody else's, while it runs or after it has ended."""
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.5: pass\nprint(flush=True); input()"
    first = snapshot()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = snapshot()
        child.communicate(b"\n")
    ended = snapshot()
    assert first.all_seconds is not None
    assert running.all_seconds is not None
    assert running.own_seconds - first.own_seconds >= 0.45
    assert ended.own_seconds - first.own_seconds >= 0.45
    assert running.all_seconds - first.all_seconds >= 0.4


@pytest.mark.slow
def test_idle_time_and_waiting_are_not_work() -> None:
    """Bug: idle or iowait seconds count as CPU: then everything sums to the cores' number, whatever they do."""
    cores = len(machine.cores())
    before = snapshot()
    first = psutil.cpu_times(percpu=True)
    time.sleep(0.3)
    last = psutil.cpu_times(percpu=True)
    now = snapshot()
    # longer than what was counted, which is longer than `rested`, however busy the machine
    passed = time.monotonic() - before.seconds
    rested = sum(b.idle - a.idle for a, b in zip(first, last, strict=True))
    assert now.all_seconds is not None
    assert before.all_seconds is not None
    if cores == len(first):  # idle and busy share what there is; the system counts in hundredths of a second per core
        assert now.all_seconds - before.all_seconds <= cores * passed - rested + 0.1 * cores + 0.2
