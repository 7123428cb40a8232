"""The table of formats in docs/reference/head_formats.md says what the code has."""

import re
from pathlib import Path

from eyas import drafters
from eyas.checkpoints._weights import formats
from eyas_train import exports
from eyas_train.exports import exporting

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "head_formats.md"


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| format (file) |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_format_has_a_row() -> None:
    """Guards a new file in checkpoints/ that the table does not know, and a row of a file that is gone."""
    known = {form.__name__.rpartition(".")[2] for form in (*formats(), *exporting())}  # type: ignore[attr-defined]
    written = {name for row in rows() for cell in (row[0], row[3]) for name in re.findall(r"\(`(\w+)`\)", cell)}
    assert written == known


def test_every_method_and_export_is_there() -> None:
    """Guards names of methods and of exports that do not exist, and a format of `eyas export` that no row has."""
    methods = {name for row in rows() for name in re.findall(r"`(\w+)`", row[2])}
    assert methods <= set(drafters.names())
    with_head = {name for name in drafters.names() if drafters.find(name).head_format}
    assert with_head - methods <= {"self_speculative"}, "methods with a head that no row names"
    cells = " ".join(row[3] for row in rows())
    missing = [name for name in exports.export_formats() if not re.search(rf"\b{name}\b", cells)]
    assert not missing
