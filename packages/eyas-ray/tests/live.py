"""The marks of the tests that start Ray."""

from __future__ import annotations

import pytest

from eyas import tiny

__all__ = ["EMBEDDED", "MARKS"]

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]
EMBEDDED = pytest.mark.skipif(
    not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not here"
)
