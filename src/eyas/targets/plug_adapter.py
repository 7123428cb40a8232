"""Plugs adapters of PEFT into the socket "adapter" (core/sockets.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.targets.adapters import AdapterSet, AdapterView, add_adapter_layers, digest, merge
from eyas.targets.fingerprints import Origin, fingerprint_of
from eyas.targets.loading import BASE, is_peft_model
from eyas.targets.quantised import library_of

__all__ = ["adapters_of", "target_with_adapters"]


def target_with_adapters(model: Any, name: str, adapters: str | Path | Mapping[str, str | Path] | None) -> Target:
    """Return the target of a PeftModel, or of a model to which adapters are added from their folders."""
    if is_peft_model(model):
        found = AdapterSet(model)
        target = Target(model.get_base_model(), name)
        target.adapters = AdapterView(found, found.active)
        return target
    assert adapters, "a PeftModel, or folders"
    target = Target(model, name)
    base = fingerprint_of(model)
    if isinstance(adapters, Mapping):
        found = AdapterSet.load(model, adapters)
        found.use("")
        target = Target(model, name)
        target.adapters = AdapterView(found, "")
        origin = Origin(base)
    else:
        target = Target((add_adapter_layers if library_of(model) else merge)(model, adapters), name)
        origin = Origin(base, digest(adapters))
    target.extensions += (origin,)
    return target


def adapters_of(given: Any) -> dict[str, str] | str | None:
    """Return adapters as `target_of` takes them: one folder, to be merged; or folders by name, to be switched.

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
    """Split "name=path" into a pair; a path that exists, or has no such beginning, has no name."""
    name, equals, path = str(item).partition("=")
    return (name, path) if equals and not Path(item).exists() and "/" not in name else (None, str(item))
