"""A tiny target, and requests with the answers of plain decoding."""

from __future__ import annotations

import pytest

import heads
from eyas.core.engine import Request
from eyas.core.target import Target
from reference import SAMPLINGS, plain_decode


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of tests/zoo.py."""
    return heads.tiny_target()


@pytest.fixture(scope="module")
def answered(target: Target) -> list[tuple[Request, list[int]]]:
    """Requests of different lengths and samplings, each with the tokens that a plain loop gives."""
    requests = [Request(tuple(range(7, 7 + n)), 14, SAMPLINGS[i % 4]) for i, n in enumerate((5, 23, 1, 12, 9, 17))]
    return [(r, plain_decode(target.model, r)) for r in requests]
