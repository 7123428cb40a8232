"""The brake: the whole does not grow without anybody noticing."""

from dataclasses import replace

import pytest

from golden import needs_weights
from house import TABLE, House, answer_numbers, faults, measured, written
from test_architecture import ROOTS

NUMBERS = {"private_imports": 0, "module_constants": 5, "tokens_per_line": 9.5}
SMALL = House({"eyas": {"core/": 30, "errors": 10}}, NUMBERS, 40)


def test_the_house_fits_its_table() -> None:
    """Guards against growth by small steps; `python tests/house.py --write` writes the table."""
    now = measured()
    found = faults(House.parse(TABLE.read_text(encoding="utf-8")), now)
    assert not found, "\n".join(found)
    for name, root in ROOTS.items():
        for place in root.rglob("*.py"):
            folder = place.relative_to(root).parent.as_posix()
            assert (place.stem if folder == "." else f"{folder}/") in now.lines[name]


@pytest.mark.slow
@needs_weights
def test_an_answer_passes_no_more_files() -> None:
    """Guards what runs, which moving files does not change: the files whose functions run for one answer, and their lines."""
    table = House.parse(TABLE.read_text(encoding="utf-8"))
    now = House({}, answer_numbers())
    assert not faults(replace(table, lines={}), now), "\n".join(faults(replace(table, lines={}), now))


def test_the_table_rises_for_an_issue_alone() -> None:
    """Guards the total: it rises by a line that names an issue alone, and falls with the source."""
    larger = House({"eyas": {"core/": 35, "errors": 10}}, NUMBERS, 45)
    with pytest.raises(ValueError, match="remove 5, or name an issue"):
        written(SMALL, larger, None)
    with pytest.raises(ValueError, match="not of the form"):
        written(SMALL, larger, "5 lines more")
    denser = House(SMALL.lines, {**NUMBERS, "tokens_per_line": 9.6})
    with pytest.raises(ValueError, match="tokens_per_line: numbers of the whole only fall"):
        written(SMALL, denser, None)
    assert written(SMALL, denser, "issue 7: 0 lines for tables").numbers["tokens_per_line"] == 9.6
    allowed = written(SMALL, larger, "issue 7: 8 lines for the guide")
    assert (allowed.total, allowed.allowed) == (45, 45)
    assert House.parse(allowed.text()) == allowed
    assert faults(replace(SMALL, lines=larger.lines), larger) == ["the table has 45 code lines, 40 are allowed"]
    smaller = written(SMALL, House({"eyas": {"core/": 20}}, NUMBERS), None)
    assert (smaller.total, smaller.allowed) == (20, 20)
