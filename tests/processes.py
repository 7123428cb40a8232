"""Child processes of tests. Limits count the work that a child does, not the time that a busy
machine takes for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

CPU_SECONDS = 300.0  # of a child and its children: far more than any test's child needs
STILL_SECONDS = 600.0  # without a hundredth of a second of work: it hangs


def accept_interrupts() -> None:
    """For `preexec_fn`: a test run in the background of a shell ignores Ctrl-C, and its children
    would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(**more: str) -> dict[str, str]:
    """For `eyas` as a child: one thread, no network, no warnings of tokenizers about forks."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


class WorkLimit:
    """Fails when a process and its children have computed for too long, or stand still."""

    def __init__(self, pid: int) -> None:
        self.pid, self.seconds, self.since = pid, 0.0, time.monotonic()

    def check(self) -> None:
        seconds, now = _cpu_seconds(self.pid), time.monotonic()
        assert seconds < CPU_SECONDS, f"process {self.pid} has computed for {seconds:.0f} s"
        if seconds != self.seconds:
            self.seconds, self.since = seconds, now
        assert now - self.since < STILL_SECONDS, f"process {self.pid} has done nothing for {now - self.since:.0f} s"


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of the process and its descendants, those that have ended included."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(one.cpu_times()[:4])
    except psutil.Error:
        pass
    return total


@contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that has ended when the block has, its children too."""
    with subprocess.Popen([str(part) for part in command], **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                process.kill()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any] | BaseProcess) -> None:
    """Wait for what a running process is about to do."""
    assert process.pid is not None
    limit = WorkLimit(process.pid)
    while not condition():
        if isinstance(process, BaseProcess):
            assert process.is_alive(), f"it has ended with {process.exitcode}"
        else:
            assert process.poll() is None, process.communicate()
        limit.check()
        time.sleep(0.005)


def finish(process: subprocess.Popen[Any], stdin: Any = None) -> tuple[Any, Any]:
    """Waits until the process ends; returns what it has written to stdout and stderr."""
    limit = WorkLimit(process.pid)
    while True:
        try:
            return process.communicate(stdin, timeout=1)
        except subprocess.TimeoutExpired:
            stdin = None
            limit.check()


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """A process from its beginning to its end, with what it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, **{**pipes, **options}) as process:
        stdout, stderr = finish(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
