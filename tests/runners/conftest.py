"""Fixtures of the runners' tests."""

from __future__ import annotations

import pytest

from eyas import kernels


@pytest.fixture
def without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification, noise and commits by torch, as on a GPU, not by the CPU's kernels."""
    monkeypatch.setattr(kernels, "available", lambda: False)
