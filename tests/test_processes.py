"""Tests of the tests: a warm child is what a new process of Python would be."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no child is warm")
TELL = """
import json, os, sys
there = [name in sys.modules for name in ("torch", "eyas", "pytest")]
print(json.dumps([sys.argv, os.getcwd(), sys.path[:3], os.environ["MINE"], "EYAS_OTHER" in os.environ, __name__, there]))
print(sys.stdin.read(), file=sys.stderr, end="")
sys.exit(3)
"""


def test_a_warm_child_is_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a program sees of its start: arguments, folder, path, variables, streams, and eyas yet to be imported."""
    monkeypatch.setenv("EYAS_OTHER", "1")
    mine = processes.environment(PYTHONPATH=f"/one{os.pathsep}/two", MINE="1")
    del mine["EYAS_OTHER"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-c", TELL, "a", "b"]
    with processes.started(command, True, env=mine, cwd=tmp_path, text=True, **pipes) as child:
        assert psutil.Process(child.pid).ppid() == os.getpid()
        out, said = processes.finish(child, "read")
    assert (child.returncode, said) == (3, "read")
    argv, folder, path, *rest = json.loads(out)
    assert (argv, folder, path) == (["-c", "a", "b"], str(tmp_path), [str(tmp_path), "/one", "/two"])
    assert rest == ["1", False, "__main__", [True, False, False]]


def test_a_module_and_its_traceback() -> None:
    """Guards `-m`, and the end by an exception."""
    done = processes.run([sys.executable, "-m", "json.tool", "no-such-file"], True, env=processes.environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-file" in done.stderr
    broken = processes.run([sys.executable, "-c", "raise KeyError('here')"], True, env=processes.environment())
    assert broken.returncode == 1
    assert broken.stderr.startswith("Traceback")
    assert broken.stderr.endswith("KeyError: 'here'\n")


def test_signals() -> None:
    """Guards Ctrl-C and kill -9: the child gets them, and its status says so."""
    command = [sys.executable, "-c", "import time\nprint(1, flush=True)\nwhile True:\n    time.sleep(0.01)"]
    for number in (signal.SIGINT, signal.SIGKILL):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": processes.accept_interrupts}
        with processes.started(command, True, env=processes.environment(), **pipes) as child:
            assert child.stdout.read(1) == b"1"
            child.send_signal(number)
            processes.finish(child)
        assert child.returncode == -number


@pytest.mark.slow
def test_what_imports_read_is_read_by_a_new_process() -> None:
    """Guards variables that libraries read once: with others than the session's, a child starts cold."""
    code = "import sys; print('torch' in sys.modules)"
    for name, value, warm in (("EYAS_X", "1", True), ("HF_HOME", "/elsewhere", False), ("OMP_NUM_THREADS", "2", False)):
        done = processes.run([sys.executable, "-c", code], True, env=processes.environment() | {name: value})
        assert done.stdout.strip() == str(warm), name
