"""Markdown for pages and terminals: tables and their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Interval = Sequence[float | None]  # value, low, high


def cell(figure: float | Interval | None, digits: int = 2, sign: str = "") -> str:
    """`1.46 [1.35, 1.59]`, `1.46`, or nothing."""
    value, low, high = (figure, None, None) if figure is None or isinstance(figure, int | float) else figure
    if value is None:
        return ""
    return f"{value:{sign}.{digits}f}" + ("" if low is None else f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """A table, whose last `numbers` columns stand to the right."""
    heads = list(heads)
    rules = ["---"] * (len(heads) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *rows))


def columns(rows: Mapping[str, Any], makers: Mapping[str, Callable[[Any], str]], corner: str = "") -> str:
    """A table of a row for each name, and of the columns that `makers` make of the rows.

    Args:
        corner: the head of the names.
    """
    lines = ([name, *(make(row) for make in makers.values())] for name, row in rows.items())
    return table([corner, *makers], lines)


def blocks(parts: Iterable[str]) -> str:
    """Paragraphs, headings and tables, parted by empty lines."""
    return "\n\n".join(parts) + "\n"
