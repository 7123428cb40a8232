"""Which characters of a streamed answer were drafted."""

import random
from types import SimpleNamespace

from eyas.api import Piece
from eyas.cli._show import Painter


def painter(pieces: list[str]) -> Painter:
    """A painter whose detokeniser says the i-th piece for token i; a piece may be empty."""
    made = Painter(SimpleNamespace(tokenizer=None))  # type: ignore[arg-type]
    made._detokeniser = SimpleNamespace(feed=pieces.__getitem__)  # type: ignore[assignment]
    return made


def test_marks_follow_the_text_however_late_it_comes() -> None:
    """Text that was held back was painted with the mark of the token that released it.

    Random pieces of text, held back at random and cut off at the end, as stop strings do. Seeded:
    no false alarm.
    """
    draw = random.Random(1)
    for _ in range(200):
        pieces = ["".join(draw.choices("ab", k=draw.randrange(4))) for _ in range(12)]
        steps, accepted = [range(0, 5), range(5, 6), range(6, 10), range(10, 12)], [4, 0, 2, 1]
        drafted = {token for step, count in zip(steps, accepted, strict=True) for token in step[:count]}
        truth = [(character, token in drafted) for token, piece in enumerate(pieces) for character in piece]
        truth = truth[: draw.randrange(len(truth) + 1)]
        made, shown = painter(pieces), list[tuple[str, bool]]()
        for step, count in zip(steps, accepted, strict=True):
            known = min(len(truth), len("".join(pieces[: step[-1] + 1])))
            upto = known if step is steps[-1] else max(len(shown), known - draw.randrange(3))
            text = "".join(character for character, _ in truth[len(shown) : upto])
            spans = made.split(Piece(text, tuple(step), count, None))
            assert "".join(span for span, _ in spans) == text
            shown += [(character, mark) for span, mark in spans for character in span]
        assert shown == truth
