"""Fixtures of the runners' tests."""

from __future__ import annotations

from fake_graphs import without_cpu_kernels  # noqa: F401  # a fixture
