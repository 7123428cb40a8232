"""For every test: a cache folder of its own, so that no measurement from elsewhere is read and none is left behind; and a limit of work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from eyas import kernels

CPU_SECONDS = 300  # of the test's own process; `timeout` in pyproject.toml ends a test that hangs


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        kernels.available()  # compiled now: no test waits for it, or sees its message
        yield


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
