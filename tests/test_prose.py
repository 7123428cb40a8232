"""Pages, help, docstrings and errors read at once: no sentence of the kinds that `tests/prose.py` finds."""

import prose


def test_texts_have_no_oddity() -> None:
    """Bug: a page, help, docstring, error or subject slides back into borrowed grammar, or has no docstring."""
    found = list(prose.places())
    assert not found, "\n".join(found)


def test_subjects_of_commits() -> None:
    """Guards the form of a subject: a verb with a capital, one change, at most 72 characters, no full stop."""
    assert prose.SUBJECT.fullmatch("Load MTP heads through the common loader")
    for wrong in ("load heads", "Loads heads", "The heads load", "Load heads; save them", "Load heads.", "L" * 73):
        assert not prose.SUBJECT.fullmatch(wrong)
