"""Bytes and operations that a pass needs, and those that the machine delivers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from eyas_lab.bench import cost


class _Event:
    """An event of a GPU whose clock a test sets: work takes two milliseconds on the device, and a
    second on the host."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = _Event.now_ms

    def synchronize(self) -> None:
        assert self.at_ms is not None

    def elapsed_time(self, end: _Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def test_work_on_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's launch is counted, so the bandwidth looks lower than it is, and the share of
    the bound higher."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    def work() -> None:
        _Event.now_ms += 2.0

    assert cost._device_seconds(work, torch.device("cuda")) == pytest.approx(0.002)


@pytest.mark.slow
def test_random_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: ones or zeros, on which hardware can be faster than on data."""
    read = list[Any]()

    def seconds(work: Any, device: torch.device) -> float:
        (numbers,) = (cell.cell_contents for cell in work.__closure__ if isinstance(cell.cell_contents, torch.Tensor))
        read.append(numbers)
        return 0.5

    monkeypatch.setattr(cost, "_device_seconds", seconds)
    assert cost.bandwidth(torch.device("cpu")) == 2**26 * 4 / 0.5
    assert len(read) == cost.REPEATS
    assert 0.2 < float(read[0][:1000].std()) < 0.4
