"""The tests of the kernels once more, with the code for ARM: NEON without dot products, and with
them. An emulator runs it (emulated_arm.py), so this says what the code computes, not how fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import emulated_arm
from runners import test_cpu
from runners.test_cpu import test_a_tree_has_plain_decodings_bits, test_the_models_own_numbers  # noqa: F401
from runners.test_cpu_ops import test_kernels_follow_and_commit_as_the_reference  # noqa: F401
from test_kernels import *  # noqa: F403
from test_kernels import _amx, _bfloat16_dots, _dots  # noqa: F401
from test_kernels_layers import *  # noqa: F403

pytestmark = [pytest.mark.slow, emulated_arm.needs]


@pytest.fixture(autouse=True, scope="module", params=emulated_arm.ISAS)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels as they are compiled for one instruction set of ARM."""
    with emulated_arm.kernels(request.param):
        test_cpu.with_cpu_kernels.cache_clear()  # what is packed for one set is of no use for another
        yield
        test_cpu.with_cpu_kernels.cache_clear()


@pytest.mark.parametrize(("name", "rule"), [("eagle3", {}), ("mtp", {"tree.expand": "confidence"})])
def test_trees_grown_at_once(name: str, rule: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the dynamic tree's own code; two of the cases that test_cpu.py has."""
    test_cpu.test_trees_grown_at_once_are_those_grown_level_by_level(name, rule, monkeypatch)
