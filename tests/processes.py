"""Child processes of tests. Limits count the work that a child does, not the time that a busy machine takes for it."""

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

import warm_child

CPU_SECONDS = 300.0  # of a child and its children: far more than any test's child needs
STILL_SECONDS = 600.0  # without a hundredth of a second of work: it hangs


def accept_interrupts() -> None:
    """For `preexec_fn`: a test run in the background of a shell ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(**more: str) -> dict[str, str]:
    """For `eyas` as a child: one thread, no network, no warnings of tokenizers about forks, and where it was when it crashed."""
    ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **ours, **more}


def unused_port() -> int:
    """A port of the loopback for a program that takes it later; none of 32768 to 60999, which the system gives away."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are taken")


class WorkLimit:
    """Fails when a process and its children compute for too long from now on, or stand still."""

    def __init__(self, pid: int) -> None:
        self.pid, self.seconds, self.since = pid, 0.0, time.monotonic()
        self.before = _cpu_seconds(pid)
        self.next_check = self.since

    def check(self) -> None:
        """Look once a second at most: who waits calls this very often, and a look reads every process of the machine."""
        now = time.monotonic()
        if now < self.next_check:
            return
        self.next_check = now + 1.0
        seconds = _cpu_seconds(self.pid) - self.before
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


# Libraries read variables with these beginnings when they are imported.
READ_BY_IMPORTS = (
    "PYTHON", "HF_", "TORCH", "TRANSFORMERS", "OMP_", "MKL_", "ONEDNN", "CUDA", "TRITON", "LD_", "LC_", "LANG",
)  # fmt: skip
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl


class _Source:
    """A process that has imported torch and transformers, and forks children on request."""

    def __init__(self) -> None:
        self.lock, self.environment = threading.Lock(), environment()
        self.environment.pop("PYTHONPATH", None)
        self.asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, warm_child.__file__, str(theirs.fileno())]
            self.process = subprocess.Popen(command, env=self.environment, pass_fds=[theirs.fileno()])
        atexit.register(self.end)

    def end(self) -> None:
        self.asking.close()
        self.process.wait()

    def serves(self, wanted: dict[str, str]) -> bool:
        """Whether what was imported is what a child with this environment would import."""
        differing = {name for name, _ in wanted.items() ^ self.environment.items()} - {"PYTHONPATH"}
        return not any(name.startswith(READ_BY_IMPORTS) for name in differing)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the number of a new child of this process."""
        prctl = ctypes.CDLL(None).prctl
        with self.lock:
            prctl(SUBREAPER, 1, 0, 0, 0)
            socket.send_fds(self.asking, [json.dumps(request).encode()], descriptors)
            answer = self.asking.recv(20)
            prctl(SUBREAPER, 0, 0, 0, 0)
        return int(answer)


_source = cache(_Source)


class _WarmPopen(subprocess.Popen[Any]):
    """A child that is forked from a process that has imported what takes seconds; the rest is as of any child."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        _, _, cwd, env, _, _, _, *pipes = others
        stdin, stdout, stderr = pipes[0], pipes[3], pipes[5]
        request = {
            "arguments": args[1:],
            "folder": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "interrupts": preexec_fn is accept_interrupts,
        }
        streams = [number if number >= 0 else k for k, number in enumerate((stdin, stdout, stderr))]
        self.pid = _source().fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]  # the child's ends, as Popen itself does here


def _popen(command: Sequence[str], warm: bool, **options: Any) -> subprocess.Popen[Any]:
    if warm and sys.platform == "linux" and _source().serves(dict(options.get("env") or os.environ)):
        assert command[0] == sys.executable
        assert command[1] in ("-m", "-c")
        return _WarmPopen(command, **options)
    return subprocess.Popen(command, **options)


@contextmanager
def started(command: Sequence[Any], warm: bool = False, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that has ended when the block has, its children too. `warm`: of Python, for tests that are not
    about what is imported or how a process starts; torch and transformers are in its memory already, which
    saves most of the seconds that a child of a test takes."""
    with _popen([str(part) for part in command], warm, **options) as process:
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


def run(command: Sequence[Any], warm: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process from its beginning to its end, with what it wrote."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, warm, **{**pipes, **options}) as process:
        stdout, stderr = finish(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
