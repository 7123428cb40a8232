"""The records in docs/results/ that pages are made from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = DOCS / "results"
Record = dict[str, Any]


@cache
def record(name: str) -> Record:
    """A record of docs/results/ by its name."""
    content: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return content
