"""The commands by name."""

from __future__ import annotations

import pkgutil
from pathlib import Path

__all__ = ["names"]


def names() -> list[str]:
    """The commands: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("_"))
