"""Which Decoder a sequence enters."""

from __future__ import annotations

import pytest

import eyas
from eyas.serve.pool import DecoderPool, Methods, sizes


@pytest.fixture(scope="module")
def methods(llm: eyas.LLM) -> Methods:
    return Methods(llm)


def rows(pool: DecoderPool, method: str, load: int) -> int:
    return len(pool.take(method, load).rows)


def test_sizes() -> None:
    assert sizes(1) == [1]
    assert sizes(4) == [1, 4]
    assert sizes(10) == [1, 4, 10]


@pytest.fixture
def all_rows_cost(methods: Methods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.llm.target.runner, "skips_rows", False)


def test_where_empty_rows_cost_nothing_a_method_has_one_decoder(methods: Methods) -> None:
    """Bug: a chat goes on in another Decoder than it began in, which has not read its prefix."""
    assert methods.llm.target.runner.skips_rows
    pool = DecoderPool(methods, 10, 16)
    decoders = {pool.take("vanilla", load) for load in range(1, 11)}
    assert [len(decoder.rows) for decoder in decoders] == [10]


@pytest.mark.usefixtures("all_rows_cost")
def test_a_decoder_fits_the_load(methods: Methods) -> None:
    """One sequence has a Decoder of its own size; more of them share larger ones; every one finds a
    row up to the last."""
    pool = DecoderPool(methods, 10, 16)
    assert [rows(pool, "vanilla", load) for load in range(1, 11)] == [1, 4, 4, 4, 10, 10, 10, 10, 10, 10]


@pytest.mark.usefixtures("all_rows_cost")
def test_after_a_rush(methods: Methods) -> None:
    """While a large Decoder is busy, a load that fills much of it goes there; a single sequence
    does not: it would pay for empty rows."""
    pool = DecoderPool(methods, 16, 16)
    large = pool.take("vanilla", 16)
    assert len(large.rows) == 16
    assert pool.take("vanilla", 5) is large
    assert rows(pool, "vanilla", 2) == 4
    assert rows(pool, "vanilla", 1) == 1


def test_methods_have_decoders_of_their_own(methods: Methods) -> None:
    """Another method's sequence gets a row too; idle Decoders are used again, and closed when many
    are open."""
    pool = DecoderPool(methods, 4, 16)
    first = pool.take("vanilla", 1)
    assert pool.take("suffix", 1) is not first
    pool.release(first)
    assert pool.take("vanilla", 1) is first
    pool.release(first)
    for method in ("prompt_lookup", "lookahead", "eagle3"):
        pool.release(pool.take(method, 4))
    assert sum(len(decoder.rows) for decoder in pool._decoders.values()) <= 12
    assert pool.take("vanilla", 1) is not first, "it was the one that had served longest ago"
