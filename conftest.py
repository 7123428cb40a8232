"""For every test: a cache folder of its own, so that no measurement from elsewhere is read and none
is left behind; and a limit of work. Which tests run: tests/tiers.py; which run
again: tests/again.py.

The garbage collector waits until all modules are imported, which halves the time for that, and leaves alone what is there
then."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from again import pytest_configure  # noqa: F401  # a hook of pytest
from tiers import (  # noqa: F401  # hooks of pytest
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

try:
    from eyas import kernels
except ImportError:  # `make wings` tests each wing without the others
    kernels = None  # type: ignore[assignment]

gc.disable()  # until pytest_collection_finish
COMPILED = Path(__file__).resolve().parent / ".cache" / "tests"
(COMPILED / "eyas" / "kernels" / "failure.json").unlink(missing_ok=True)  # there may be a compiler now
# threads that wait for each other on a busy machine make a test of seconds one of minutes
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # torch's code for AMX dies on some virtual machines
os.environ["XDG_CACHE_HOME"] = str(COMPILED)  # while tests are collected: some of them ask for the kernels then
CPU_SECONDS = 300  # of the test's own process; `timeout` in pyproject.toml ends a test that hangs


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's bindings report leaks


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels are compiled once for all sessions, then copied: no test waits for the compiler,
    or sees its message."""
    folder = tmp_path_factory.mktemp("cache")
    if kernels is not None and kernels.available():
        (folder / "eyas" / "kernels").mkdir(mode=0o700, parents=True)
        for file in (COMPILED / "eyas" / "kernels").glob("cpu-*"):
            shutil.copy2(file, folder / "eyas" / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(scope="session")
def target() -> Any:
    """The llama of tests/zoo.py: for tests that change nothing of it."""
    import zoo
    from eyas.core.target import Target

    return Target(zoo.FAMILIES["llama"]())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test that computes for too long, however busy the machine is."""

    def end(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{item.nodeid} has computed for {CPU_SECONDS} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
