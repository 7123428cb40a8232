"""Tests which cases `make test` leaves to `make test-all`, and that it says how many (tests/tiers.py, tests/covers.py)."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from covers import cover, wanted
from eyas import drafters
from tiers import MATRICES, Matrix

TESTS = Path(__file__).parent
LIMIT = 0.05  # of the test functions, those that `make test` leaves out as a whole


@pytest.fixture
def matrices(pytestconfig: pytest.Config) -> dict[str, Matrix]:
    """Every test function that this session has collected, with what `make test` runs of it."""
    return pytestconfig.stash[MATRICES]


def test_each_value_of_a_covered_matrix_occurs(matrices: dict[str, Matrix]) -> None:
    """Guards the rule of `cover`: each value of each axis occurs, or as many as a share says."""
    for test, matrix in matrices.items():
        if matrix.covered:
            assert matrix.chosen, test
            for axis in matrix.cases[0]:
                values = {case[axis] for case in matrix.cases}
                occurring = {matrix.cases[place][axis] for place in matrix.chosen}
                count = min(matrix.shares.get(axis, len(values)), len(values))
                assert len(occurring) >= count, f"{test}: {axis}"


def test_few_functions_are_left_out_as_a_whole(matrices: dict[str, Matrix]) -> None:
    """Guards against a suite that gets faster by testing less: each function but a few has a case in `make test`."""
    without = [test for test, matrix in matrices.items() if not matrix.chosen]
    if len(matrices) > 1000:  # all of the suite, not a part of it
        assert len(without) <= LIMIT * len(matrices), without


def test_every_method_meets_many_tests(matrices: dict[str, Matrix]) -> None:
    """Guards the shares of long lists: tests run different methods, and together each of them many times."""
    if len(matrices) < 1000:
        pytest.skip("a part of the suite was collected")
    names = {repr(name) for name in drafters.names()}
    lists = [matrix for matrix in matrices.values() if matrix.covered and names <= _values(matrix.cases)]
    met = Counter(value for m in lists for value in _values([m.cases[place] for place in m.chosen]))
    assert len(lists) >= 8
    assert min(met[name] for name in names) >= 3, met


def _values(cases: Sequence[Mapping[str, str]]) -> set[str]:
    return {value for case in cases for value in case.values()}


def test_a_cover_is_small_and_complete() -> None:
    """By hand: three methods, two kernels; what is taken anyway counts."""
    cases = [{"name": name, "kernels": kernels} for name in "abc" for kernels in ("on", "off")]
    goal = wanted("test", cases, {})
    assert len(goal) == 5
    assert cover(cases, goal) == {0, 3, 4}  # a on, b off, c on
    assert cover(cases, goal, [1]) == {1, 2, 4}  # a off, b on, c on
    assert len(cover(cases, wanted("test", cases, {"name": 1}))) == 2  # one method, by both


def test_shares_begin_at_different_places() -> None:
    """Guards against the first methods of the list being those of every test. Deterministic: a checksum of the name."""
    cases = [{"name": str(i)} for i in range(20)]
    shares = [{value for _, value in wanted(f"test_{n}", cases, {"name": 4})} for n in range(40)]
    assert {len(share) for share in shares} == {4}
    assert set[str]().union(*shares) == {str(i) for i in range(20)}


PROGRAM = """
import pytest

@pytest.mark.cover("y-0", b=1)
@pytest.mark.quick("x-0")
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_matrix(a, b): pass

@pytest.mark.cover
@pytest.mark.parametrize("c", [0])
def test_slow(c): pass

@pytest.mark.exhaustive
def test_long(): pass
"""


@pytest.mark.quick("test")
@pytest.mark.parametrize(("options", "passed", "further"), [
    ((), 5, "3 further cases: make test-all"),
    (("-m", "not slow"), 1, "3 further cases"),
    (("-p", "xdist", "-n", "2"), 5, "3 further cases"),
    (("--all",), 8, ""),
    (("test_a.py::test_long",), 1, ""),
], ids=["test", "fast", "two processes", "all", "named"])  # fmt: skip
def test_what_runs_and_what_is_said(options: tuple[str, ...], passed: int, further: str, tmp_path: Path) -> None:
    """Bug: a command runs other cases than it says, or nobody learns that some were left out."""
    hooks = (TESTS.parent / "conftest.py").read_text().partition("from tiers import")[2].partition(")")[0]
    (tmp_path / "conftest.py").write_text(f"from tiers import{hooks})\n")
    (tmp_path / "test_a.py").write_text(PROGRAM)
    marks = "cover\nquick\nslow\nlong\nexhaustive".replace("\n", "\n ")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n {marks}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
    assert further in done.stdout
    assert bool(further) == ("further cases" in done.stdout)
