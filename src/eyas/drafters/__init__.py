"""One file = one method: `eagle1.py` is the method `eagle1`. Methods are discovered, not listed.

A method file defines one subclass of `DraftMethod` named `Method`. A method outside of this folder is
named by its dotted path: `mypackage.mymodule`. Files that begin with an underscore are shared
tools. This module knows no method by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession, TreeSize
from eyas.drafters._method import Batch, DraftMethod, Loss
from eyas.errors import OptionError, near

__all__ = [
    "Batch",
    "Capturable",
    "CycleInput",
    "DraftMethod",
    "DraftSession",
    "Drafter",
    "Loss",
    "TreeSize",
    "find",
    "names",
]


def names() -> list[str]:
    """The methods in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if not m.name.startswith("_"))


def find(name: str) -> type[DraftMethod]:
    """The method of that name, or at that dotted path. OptionError for one that is not there."""
    if not isinstance(name, str):
        raise OptionError(f"a method is the name of one, not {type(name).__name__}; known: {', '.join(names())}")
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if not dotted and name not in names():
        raise OptionError(f"unknown method {name!r}; {near(name, names())}")
    try:
        method = importlib.import_module(name if dotted else f"{__name__}.{name}").Method
    except (ImportError, AttributeError, SyntaxError) as error:
        raise OptionError(f"method {name!r} cannot be loaded: {error}") from error
    if not (isinstance(method, type) and issubclass(method, DraftMethod)):
        raise OptionError(f"method {name!r} cannot be loaded: its Method is no subclass of eyas.drafters.DraftMethod")
    return method
