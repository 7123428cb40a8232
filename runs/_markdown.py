"""Markdown for pages and terminals: tables and their cells, and pages that a script makes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.files import write_text

Interval = Sequence[float | None]  # value, low, high


def cell(figure: float | Interval | None, digits: int = 2) -> str:
    """`1.46 [1.35, 1.59]`, `1.46`, or nothing."""
    value, low, high = (figure, None, None) if figure is None or isinstance(figure, int | float) else figure
    if value is None:
        return ""
    return f"{value:.{digits}f}" + ("" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """A table, whose last `numbers` columns stand to the right."""
    heads = list(heads)
    rules = ["---"] * (len(heads) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *rows))


def columns(rows: Mapping[str, Any], makers: Mapping[str, Callable[[Any], str]], corner: str = "") -> str:
    """A table of a row for each name, and of the columns that `makers` make; `corner` is the head of the names."""
    lines = ([name, *(make(row) for make in makers.values())] for name, row in rows.items())
    return table([corner, *makers], lines)


def renew(doc: str | None, make: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None) -> int:
    """Write pages, or with --check nothing: then the exit status is 1 where a page would change."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a page would change")
    check, changed = parser.parse_args(arguments).check, False
    for page, text in make().items():
        changed |= not page.exists() or page.read_text(encoding="utf-8") != text
        if not check:
            write_text(page, text)
    return int(check and changed)
