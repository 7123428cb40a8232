"""Formats of heads, written for the engines that read them. One file is one format; `exporting` finds it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from eyas.checkpoints.tools import formats

__all__ = ["exporting"]


def exporting() -> list[Any]:
    """Return the formats that heads are exported to: the modules of this folder, then those of other distributions."""
    modules = (module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    own = [importlib.import_module(f"{__name__}.{name}") for name in modules]
    return [form for form in dict.fromkeys([*own, *formats()]) if hasattr(form, "EXPORTS")]
