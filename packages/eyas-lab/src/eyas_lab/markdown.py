"""Tables in Markdown, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table"]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
