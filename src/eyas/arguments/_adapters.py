"""Adapters as callers of `eyas.load` write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import OptionError
from eyas.targets.loading import BASE

__all__ = ["adapters_of"]


def adapters_of(given: Any) -> dict[str, str] | str | None:
    """Adapters as callers write them: one folder, to be merged; or folders by name, to be switched.

    Accepted are a path; a mapping from names to paths; and a list of paths and of texts
    "NAME=PATH". A list of one path is that path.

    Raises:
        OptionError: something else, a name that is there twice, or the name "base".
    """
    if given is None:
        return None
    if isinstance(given, str | Path):
        given = [given]
    pairs = list(given.items()) if isinstance(given, Mapping) else [_name_and_path(item) for item in _listed(given)]
    if not pairs:
        return None
    if len(pairs) == 1 and pairs[0][0] is None:
        return str(pairs[0][1])
    found: dict[str, str] = {}
    for name, path in pairs:
        name = Path(path).name if name is None else name
        if not isinstance(path, str | Path) or not isinstance(name, str) or not name or name == BASE or name in found:
            raise OptionError(
                f"adapters have names of their own, other than {BASE!r}: cannot use {name!r} for {path!r}"
            )
        found[name] = str(path)
    return found


def _listed(given: Any) -> Sequence[Any]:
    if not isinstance(given, Sequence) or not all(isinstance(item, str | Path) for item in given):
        raise OptionError(f"an adapter is a folder or a hub id, or a dict of them by name; got {given!r}")
    return given


def _name_and_path(item: str | Path) -> tuple[str | None, str]:
    """ "name=path" as a pair; a path that exists, or has no such beginning, has no name."""
    name, equals, path = str(item).partition("=")
    return (name, path) if equals and not Path(item).exists() and "/" not in name else (None, str(item))
