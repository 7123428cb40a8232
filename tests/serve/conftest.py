"""One model and one server for the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import eyas
from eyas import tiny
from serving import Running, running, small_llm


@pytest.fixture(scope="session")
def llm() -> eyas.LLM:
    """The embedded model."""
    if not (tiny.FOLDER / tiny.PACKED).exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    return small_llm()


@pytest.fixture(scope="session")
def server(llm: eyas.LLM) -> Iterator[Running]:
    """A server of it."""
    with running(llm, rows=4) as one:
        yield one
