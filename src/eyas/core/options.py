"""The options of a method or of a training, as a dataclass: their names, values and defaults.

A field's help is the docstring below it. `Annotated[int, TRAINING]` marks an option that has no
effect unless a head is trained, `Annotated[int, NEW_HEADS]` one that describes a head that is yet
to be made. `option_texts` reads help and marks for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from eyas.errors import OptionError, UnknownOptionError, near

__all__ = ["NEW_HEADS", "TRAINING", "build_options", "option_defaults", "option_values"]

TRAINING = "training only"
NEW_HEADS = "new heads only"


def build_options(kind: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return an instance of the options dataclass `kind` from `{"tree.nodes": 60}` or `{"tree": {"nodes": 60}}`.

    An unknown name raises OptionError, which lists similar names.
    """
    defaults = kind()
    groups: dict[str, dict[str, Any]] = {}
    known = {f.name: f for f in fields(kind)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if head not in known or (rest and not is_dataclass(getattr(defaults, head))):
            raise UnknownOptionError(prefix + name, near(prefix + name, option_defaults(kind, prefix)))
        if is_dataclass(getattr(defaults, head)) and not is_dataclass(value):
            if not rest and not isinstance(value, Mapping):
                inner_names = option_defaults(type(getattr(defaults, head)), name + ".")
                raise OptionError(f"option {prefix + name!r} is a group; give {', '.join(inner_names)}")
            groups.setdefault(head, {}).update({rest: value} if rest else value)
        else:
            changes[head] = value
    for head, inner in groups.items():
        changes[head] = build_options(type(getattr(defaults, head)), inner, prefix + head + ".")
    return replace(defaults, **changes)


def option_defaults(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return all dotted option names of a dataclass with their default values."""
    return option_values(kind(), prefix)


def option_values(options: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass and of the dataclasses in it, as `{"tree.nodes": 60}`."""
    found: dict[str, Any] = {}
    for field in fields(options):
        name, value = prefix + field.name, getattr(options, field.name)
        found.update(option_values(value, f"{name}.") if is_dataclass(value) else {name: value})
    return found
