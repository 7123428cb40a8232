"""Fixtures of the runners' tests."""

from fake_graphs import without_cpu_kernels  # noqa: F401  # a fixture
