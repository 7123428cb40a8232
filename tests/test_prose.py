"""The pages that a newcomer reads, and the help, read at once: no sentence of the kinds that `tests/prose.py` counts."""

from __future__ import annotations

import prose


def test_strict_pages_have_no_oddity() -> None:
    """Bug: the front pages slide back into long sentences and borrowed grammar. `python tests/prose.py` shows them."""
    found = [f"{kind}: {place}" for kind, place in prose.places(prose.files_of(prose.STRICT))]
    assert not found, "\n".join(found)


def test_counts_only_fall() -> None:
    """Bug: other pages and help texts get worse. `python tests/prose.py --places` shows the sentences; after a
    rewrite `--write` lowers the table."""
    allowed = prose.table()
    risen = [
        f"{group}: {count} of {kind}, the table has {allowed[group][kind]}"
        for group, kinds in prose.measured().items()
        for kind, count in kinds.items()
        if count > allowed[group][kind]
    ]
    assert not risen, "\n".join(risen)


def test_sentences_and_patterns() -> None:
    """Guards the counting itself: each kind is found, and code, links and abbreviations are not."""
    text = "# What is it?\n\nThis is no list. A [link](x-y.md); a `b;c;d`; and more.\n\n```\nbehind\n```\n| that of | fine |\n"
    found = [kind for sentence in prose.sentences(text) for kind in prose.oddities(sentence)]
    assert found == ["is_no", "semicolons", "that_of"]
    assert list(prose.oddities("It says what it found")) == ["what_as_noun"]
    assert list(prose.oddities("What is it?")) == []
    assert list(prose.oddities("word " * 31)) == ["long"]
