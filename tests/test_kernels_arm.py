"""The tests of the kernels with the code for ARM, by an emulator: what it computes, not how fast."""

from collections.abc import Iterator

import pytest

import emulated_arm
from eyas.runners._decoders import FAMILIES
from runners import test_cpu
from runners.test_cpu_ops import test_kernels_follow_and_commit_as_the_reference  # noqa: F401
from test_kernels import *  # noqa: F403
from test_kernels import _amx, _bfloat16_dots, _dots  # noqa: F401
from test_kernels_layers import *  # noqa: F403

del test_rows_whose_scales_lie_apart  # noqa: F821  # the emulator does not copy rows of addresses

pytestmark = [pytest.mark.slow, emulated_arm.needs]


@pytest.fixture(autouse=True, scope="module", params=emulated_arm.ISAS)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels as they are compiled for one instruction set of ARM."""
    with emulated_arm.kernels(request.param):
        test_cpu.with_cpu_kernels.cache_clear()  # what is packed for one set is of no use for another
        yield
        test_cpu.with_cpu_kernels.cache_clear()


# The emulator copies the tensors to which records point. Matrices of experts lie behind records of their own.
EXPERTS = ("mixtral", "gpt_oss", "qwen3_next")
WITHOUT_EXPERTS = [family for family in FAMILIES if "moe" not in family and family not in EXPERTS]


@pytest.mark.parametrize("family", WITHOUT_EXPERTS)
def test_families(family: str) -> None:
    """Guards what differs from family to family, and bits that do not depend on the other tokens."""
    test_cpu.test_the_models_own_numbers(family)
    test_cpu.test_a_tree_has_plain_decodings_bits(family)


@pytest.mark.parametrize(("name", "rule"), [("eagle3", {}), ("mtp", {"tree.expand": "confidence"})])
def test_trees_grown_at_once(name: str, rule: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the dynamic tree's own code; two of the cases that test_cpu.py has."""
    test_cpu.test_trees_grown_at_once_are_those_grown_level_by_level(name, rule, monkeypatch)
