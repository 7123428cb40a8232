"""Tests which cases `make test` leaves to `make test-all`, and that it says how many (tests/tiers.py, tests/covers.py)."""

import pytest

from covers import cover, wanted
from tiers import MATRICES, Matrix

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


def test_a_cover_is_small_and_complete() -> None:
    """By hand: three methods, two kernels; what is taken anyway counts."""
    cases = [{"name": name, "kernels": kernels} for name in "abc" for kernels in ("on", "off")]
    goal = wanted("test", cases, {})
    assert len(goal) == 5
    assert cover(cases, goal) == {0, 3, 4}  # a on, b off, c on
    assert cover(cases, goal, [1]) == {1, 2, 4}  # a off, b on, c on
    assert len(cover(cases, wanted("test", cases, {"name": 1}))) == 2  # one method, by both
