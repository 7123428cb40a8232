"""The pages and the help read at once: no sentence of the kinds that `tests/prose.py` finds."""

from __future__ import annotations

import prose


def test_pages_and_help_have_no_oddity() -> None:
    """Bug: a page or a help text slides back into long sentences and borrowed grammar."""
    found = list(prose.places())
    assert not found, "\n".join(found)


def test_sentences_and_patterns() -> None:
    """Guards the counting itself: each kind is found, and code, links and abbreviations are not."""
    text = "# What is it?\n\nThis is no list. A [link](x-y.md); a `b;c;d`; and more.\n\n```\nbehind\n```\n| that of | fine |\n"
    found = [kind for sentence in prose.sentences(text) for kind in prose.oddities(sentence)]
    assert found == ["is_no", "semicolons", "that_of"]
    assert list(prose.oddities("It says what it found")) == ["what_as_noun"]
    assert list(prose.oddities("What is it?")) == []
    assert list(prose.oddities("word " * 31)) == ["long"]
