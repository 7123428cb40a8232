"""How the tokens of an answer become text: what is known of stop strings before the tokens are emitted."""

import random

import pytest

from eyas.api import TextReader
from test_text import TOKENIZERS, Foreign, _llama, _wrapped


@pytest.mark.parametrize("kind", [*TOKENIZERS, "foreign"])
def test_stops_after_is_what_feed_will_say(kind: str) -> None:
    """Guards the question behind drafts: in the middle of a text it says what reading says then."""
    tokenizer = _wrapped(_llama(), Foreign) if kind == "foreign" else TOKENIZERS[kind]
    rng, hits = random.Random(kind), 0
    for _ in range(40):
        tokens = rng.choices(range(5, min(len(tokenizer), 300)), k=12)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        begin = rng.randrange(max(1, len(text) - 3))
        stops = [text[begin : begin + 3] or "a", "zzz"]
        reader, plain = TextReader(tokenizer, stops), TextReader(tokenizer, stops)
        read = rng.randrange(4)
        if any(plain.feed(token) | reader.feed(token) for token in tokens[:read]):
            continue
        length = next((n for n, token in enumerate(tokens[read:], start=1) if plain.feed(token)), None)
        asked = [reader.stops_after(tokens[read : read + n]) for n in range(1, (length or len(tokens) - read) + 1)]
        assert asked == [n == length for n in range(1, len(asked) + 1)]
        assert [reader.feed(token) for token in tokens[read : read + len(asked)]] == asked
        hits += length is not None
    assert hits > 5
    assert not TextReader(tokenizer).stops_after(tokens)
    assert not TextReader(None).stops_after(tokens)
