"""Parts of other distributions of this project, by name. The error for a missing part names the package to install.

They register by entry points (groups eyas.commands, eyas.methods, eyas.formats and eyas.parts). This
module imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from eyas.errors import OptionError

__all__ = ["DISTRIBUTIONS", "check", "command_of", "find_part", "part"]

# A distribution eyas-NAME, which the extra NAME of eyas installs -> kind -> the names that it brings. "heads" are keys of
# config.json by which the formats of heads are known, "saves" methods whose heads it writes.
DISTRIBUTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "lab": {
        "commands": ("audit", "bench", "demo", "examine", "tune"),
        "methods": (
            "cascade",
            "distillspec",
            "glide",
            "hydra",
            "kangaroo",
            "lookahead",
            "medusa",
            "rest",
            "self_speculative",
            "spectr",
        ),
        "heads": ("eyas_adapter", "hydra_num_heads", "medusa_num_heads"),
    },
    "gpu": {"parts": ("gpu",)},
    "ray": {"parts": ("fleet", "training", "workers")},
    "train": {
        "commands": ("accelerate", "datastore", "export", "features", "push", "regenerate", "train"),
        "parts": ("adapt", "losses"),
        "saves": ("dflash", "dflash2", "dspark"),
    },
}


def check(kind: str, name: str, subject: str) -> None:
    """Raise OptionError, which says what to install, if another distribution brings the name.

    Args:
        kind: a key of a distribution, such as "commands".
        subject: the wanted part, for the message.
    """
    for extra, kinds in DISTRIBUTIONS.items():
        if name in kinds.get(kind, ()):
            raise OptionError(f"{subject} needs the package eyas-{extra}: {command_of(extra)}")


def command_of(extra: str) -> str:
    """Return the command that installs an extra. It runs in a clone, because eyas is on no public index."""
    folders = f"./packages/eyas-{extra}" if extra in DISTRIBUTIONS else f"'.[{extra}]'"
    if extra == "train":
        folders = f"./packages/eyas-lab {folders}"  # which it needs
    return f"pip install {folders} in a clone of eyas"


@cache
def part(name: str, subject: str) -> Any:
    """Return the module that a distribution registers as entry point `name` of the group "eyas.parts".

    Args:
        subject: the command that needs it, for the message.

    Raises:
        OptionError: the distribution is not installed.
    """
    if (found := find_part(name)) is not None:
        return found
    check("parts", name, subject)
    raise OptionError(f"{subject} needs a package that brings the part {name}: install one")


def find_part(name: str) -> Any:
    """Return the module that a distribution registers as entry point `name` of the group "eyas.parts"; None if no
    installed distribution does."""
    points = entry_points(group="eyas.parts", name=name)
    return next((point.load() for point in points), None)
