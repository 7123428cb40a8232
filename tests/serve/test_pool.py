"""Which Decoder a sequence enters."""

import pytest

import eyas
from eyas.serve.pool import DecoderPool, Methods


@pytest.fixture(scope="module")
def methods(llm: eyas.LLM) -> Methods:
    return Methods(llm)


def test_where_empty_rows_cost_nothing_a_method_has_one_decoder(methods: Methods) -> None:
    """Bug: a chat goes on in another Decoder than it began in, which has not read its prefix."""
    assert methods.llm.target.runner.skips_rows
    pool = DecoderPool(methods, 10, 16)
    decoders = {pool.take("vanilla", load) for load in range(1, 11)}
    assert [len(decoder.rows) for decoder in decoders] == [10]


def test_a_decoder_fits_the_load(methods: Methods, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence has a Decoder of its own size; more of them share larger ones; every one finds a row up to the last.
    While a large Decoder is busy, a load that fills much of it goes there; a single sequence does not: it would pay for
    empty rows."""
    monkeypatch.setattr(methods.llm.target.runner, "skips_rows", False)
    for limit, loads, expected in (
        (10, range(1, 11), [1, 4, 4, 4, 10, 10, 10, 10, 10, 10]),
        (16, (16, 5, 2, 1), [16, 16, 4, 1]),
    ):
        pool = DecoderPool(methods, limit, 16)
        assert [len(pool.take("vanilla", load).rows) for load in loads] == expected


def test_methods_have_decoders_of_their_own(methods: Methods) -> None:
    """Another method's sequence gets a row too; idle Decoders are used again, and closed when many are open."""
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
