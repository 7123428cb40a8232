"""Pages, help, docstrings and errors read at once: no sentence of the kinds that `tests/prose.py` finds."""

import ast
from pathlib import Path

import prose

MODULE = '''"""Counts what it finds.

    a drawing; of; what is drawn
name.py     what the file has; and; more
"""

class Counter:
    def count(self, size: int) -> int:
        """Count.

        Args:
            size: that of
                the whole.
        """
        raise ValueError(f"{size} is no size")

    def _hidden(self) -> None:
        """Read it behind the others."""
'''


def test_texts_have_no_oddity() -> None:
    """Bug: a page, help, docstring, error or subject slides back into borrowed grammar, or has no docstring."""
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


def test_docstrings_and_errors() -> None:
    """Guards the texts of a module: docstrings with their sections, and raised errors; drawings are left out."""
    tree = ast.parse(MODULE)
    found = [[kind for s in prose.sentences(text) for kind in prose.oddities(s)] for text in prose.docstrings(tree)]
    assert found == [["what_as_noun"], [], ["that_of"], ["beside_behind"]]
    assert list(prose.errors(tree)) == ["`code` is no size"]


def test_public_names_without_a_docstring() -> None:
    """Guards the search: private names and private modules are left out, and a base class's docstring is enough."""
    above = (
        'class Above:\n    """It."""\n    def read(self) -> int:\n        """Read it."""\n    def write(self): ...\n'
    )
    below = "class Below(Above[int]):\n    def read(self): ...\n    def write(self): ...\n    def _own(self): ...\n"
    others = "@fault('It is late.')\ndef late(): ...\ndef loud(): ...\n"
    trees = {Path("a.py"): ast.parse(above), Path("b.py"): ast.parse(below + others), Path("_c.py"): ast.parse(others)}
    assert list(prose.undocumented(trees)) == [
        "no docstring: a.py: Above.write",
        "no docstring: b.py: Below",
        "no docstring: b.py: Below.write",
        "no docstring: b.py: loud",
    ]


def test_subjects_of_commits() -> None:
    """Guards the form of a subject: a verb with a capital, one change, at most 72 characters, no full stop."""
    assert prose.SUBJECT.fullmatch("Load MTP heads through the common loader")
    for wrong in ("load heads", "Loads heads", "The heads load", "Load heads; save them", "Load heads.", "L" * 73):
        assert not prose.SUBJECT.fullmatch(wrong)
