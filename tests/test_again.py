"""Tests `pytest --again`: what CI says of tests that fail once, always, or in the company of others (tests/again.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from again import MAX_FAILED

TESTS = Path(__file__).parent
HOOKS = "from again import pytest_configure\nfrom tiers import pytest_addoption\n"
ONCE = """
import os, pathlib, pytest

def first(name):
    file = pathlib.Path(__file__).with_name(name)
    return not file.exists() and file.write_text("seen") > 0

"""
GOOD = "def test_good(): pass\n"
A = "FLAKY test_x.py::test_a"
CASES = {
    "once": (ONCE + GOOD + "def test_a(): assert not first('a'), 'the first failure'\n", 0, "2 passed in", [A, "the first failure"]),
    "always": (
        ONCE + GOOD + "def test_a(): assert not first('a')\ndef test_b(): assert False\n",
        1, "1 failed, 2 passed in", [A, "alone (2 of 2): test_x.py::test_b"],
    ),
    "worker crashes": (ONCE + GOOD + "def test_a():\n    if first('a'): os._exit(9)\n", 0, "2 passed in", [A, "crashed while running"]),
    "many": (
        f"import pytest\n@pytest.mark.parametrize('k', range({MAX_FAILED + 1}))\ndef test_a(k): assert False\n",
        1, f"{MAX_FAILED + 1} failed in", ["none runs again"],
    ),
}  # fmt: skip


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a suite of one file, by two processes of xdist if it may start them."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    (folder / "test_x.py").write_text(program)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**kept, "PYTHONPATH": str(TESTS), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations", "2", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.cover(name=2)
@pytest.mark.parametrize("name", CASES)
def test_what_fails_runs_again_alone(name: str, tmp_path: Path) -> None:
    """Bug: a red run for a test that fails on a busy machine only, or a green one for a test that fails alone."""
    program, status, counts, said = CASES[name]
    done = run(tmp_path, program, "--again", "-n", "2")
    assert done.returncode == status, done.stdout + done.stderr
    assert counts in done.stdout.strip().splitlines()[-1]
    for text in said:
        assert text in done.stdout + done.stderr
    assert ("again, alone" in done.stdout) == (name != "many")
    assert ("flaky" in done.stdout) == any(text.startswith("FLAKY") for text in said)
    if status == 0 and "FLAKY" in done.stdout:
        assert done.stdout.strip().splitlines()[-2].startswith("FLAKY ")


@pytest.mark.slow
def test_only_ci_runs_tests_again(tmp_path: Path) -> None:
    """Bug: `make test` hides a test that fails once from its author. The commands of CI ask for it; no other does."""
    done = run(tmp_path, CASES["once"][0])
    assert (done.returncode, "again, alone" in done.stdout) == (1, False)
    root = TESTS.parent
    if (root / "Makefile").exists():  # the tests of a wheel have none
        assert "--again" not in (root / "Makefile").read_text()
        assert "make test ARGS=--again" in (root / ".ci" / "run").read_text()
