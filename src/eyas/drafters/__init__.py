"""One file = one method: `eagle1.py` is the method `eagle1`. Methods are discovered, not listed.

A method file defines one subclass of `DraftMethod` named `Method`. In other folders of eyas it is called
`method_NAME.py`. Methods outside of eyas have a dotted path, or the name that their distribution gives them:

    [project.entry-points."eyas.methods"]
    mine = "mypackage.mymodule"

Files that begin with an underscore are shared; `tools.py` has the names that authors of methods may use. This
module knows no method by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession, TreeSize
from eyas.drafters._method import Batch, DraftMethod, Loss
from eyas.errors import OptionError, near

__all__ = [
    "Batch", "Capturable", "CycleInput", "DraftMethod", "DraftSession", "Drafter", "Loss", "TreeSize", "find", "merge",
    "names",
]  # fmt: skip


@cache
def _modules() -> Mapping[str, str]:
    """Return the module of each method, by the method's name; eyas' own come before others of the same name."""
    others = {point.name: point.value for point in entry_points(group="eyas.methods")}
    package = Path(__file__).parents[1]
    files = [*package.glob("drafters/[!_]*.py"), *package.glob("*/method_*.py")]
    files = [file for file in files if file.stem != "tools"]
    return others | {file.stem.removeprefix("method_"): f"eyas.{file.parent.name}.{file.stem}" for file in files}


def names() -> list[str]:
    """Return the names of the methods of eyas and of those that other distributions name."""
    return sorted(_modules())


def find(name: str) -> type[DraftMethod]:
    """Return the method of that name, or at that dotted path. Raise OptionError for one that is not there."""
    if not isinstance(name, str):
        raise OptionError(f"a method is the name of one, not {type(name).__name__}; known: {', '.join(names())}")
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if not dotted and name not in _modules():
        from eyas import elsewhere

        elsewhere.check("methods", name, f"method {name}")
        raise OptionError(f"unknown method {name!r}; {near(name, names())}. A module of your own needs a dotted path")
    try:
        method = importlib.import_module(name if dotted else _modules()[name]).Method
    except (ImportError, AttributeError, SyntaxError) as error:
        raise OptionError(f"method {name!r} cannot be loaded: {error}") from error
    if not (isinstance(method, type) and issubclass(method, DraftMethod)):
        raise OptionError(
            f"method {name!r} cannot be loaded: its Method is not a subclass of eyas.drafters.DraftMethod"
        )
    return method


def merge(first: Drafter, second: Drafter) -> Drafter:
    """Return a drafter whose trees hold the proposals of both (`_merge.py`)."""
    merged: Drafter = importlib.import_module(f"{__name__}._merge").Merged(first, second)
    return merged
