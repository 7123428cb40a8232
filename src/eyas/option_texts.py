"""The options of a method or of a training (`core.options`) as people read and write them: each with its help and
its type, and its value from a text. This module knows no command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from eyas.core.options import NEW_HEADS, TRAINING
from eyas.errors import OptionError

__all__ = ["Option", "field_docstrings", "list_options", "parse_option", "plain_type"]


@dataclass(frozen=True)
class Option:
    """A field of an options dataclass, or of a dataclass in it."""

    name: str
    """Dotted: the field `nodes` of the field `tree` is `tree.nodes`."""
    default: Any
    annotation: Any
    """The type, without Annotated."""
    help: str
    use: str
    """Where the option has an effect: TRAINING, NEW_HEADS or "" (everywhere)."""

    @property
    def shown_default(self) -> str:
        """The default value, for people."""
        if self.default is None:
            return "none"
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


def list_options(kind: type, prefix: str = "", described: bool = True) -> Iterator[Option]:
    """Return every option of an options dataclass, in the order of the fields; not `described`: without its help, for
    which the source is read."""
    defaults = kind()
    hints = get_type_hints(kind, include_extras=True)
    helps = field_docstrings(kind) if described else {}
    for field in fields(kind):
        default = getattr(defaults, field.name)
        if is_dataclass(default):
            yield from list_options(type(default), f"{prefix}{field.name}.", described)
            continue
        annotation, *marks = (
            get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [hints[field.name]]
        )
        use = next((mark for mark in marks if mark in (TRAINING, NEW_HEADS)), "")
        yield Option(prefix + field.name, default, annotation, helps.get(field.name, ""), use)


def plain_type(annotation: Any) -> Any:
    """Return int, float, bool, a Literal, tuple (of numbers), or str: how the text of a value is read."""
    if get_origin(annotation) in (Union, UnionType):
        return plain_type(next(part for part in get_args(annotation) if part is not type(None)))
    if get_origin(annotation) is tuple:
        return tuple
    return annotation if annotation in (int, float, bool) or get_origin(annotation) is Literal else str


def parse_option(option: Option, text: str) -> Any:
    """Return the value of an option from its text, `N,N` for several numbers. OptionError when it has
    none."""
    kind = plain_type(option.annotation)
    try:
        if kind is tuple:
            return tuple(float(part) for part in text.split(","))
        if kind is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        expected = "list of numbers separated by commas" if kind is tuple else f"value of type {kind.__name__}"
        raise OptionError(f"{option.name}: {text!r} is not a {expected}") from None


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases; none without source code."""
    from docstring_parser import parse_from_object

    described: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        params = parse_from_object(base).params
        described |= {p.arg_name: " ".join((p.description or "").split()) for p in params}
    return described
