"""The texts that an answer may have, as callers write it: `Structure`, and its making from
keywords.

    response_format={"type": "json_object"}                                   a JSON object
    response_format={"type": "json_schema", "json_schema": {"schema": ...}}   JSON of this schema (OpenAI's form)
    regex="..."        texts that the expression matches as a whole
    grammar="..."      Lark's form (start: ...) or the EBNF of llama.cpp (root ::= ...)
    choice=[...]       one of these texts

This module knows no library and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.errors import InputError, OptionError

__all__ = ["KEYWORDS", "Structure", "json_rule", "structure_of", "without_annotations"]

KEYWORDS = ("response_format", "regex", "grammar", "choice")
JSON_OPTIONS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces in JSON: as Python writes it. A schema inside a grammar says so under the key
"x-guidance"."""
FORMATS = ("text", "json_object", "json_schema")
TEXT_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Values of `format` in a JSON schema that llguidance enforces."""
DATA = ("const", "enum")  # keys of a schema that hold data, not schemas
ANNOTATIONS = frozenset(
    ("$comment", "default", "deprecated", "description", "example", "examples", "readOnly", "title", "writeOnly")
)
"""Keys of a schema that bind nobody. Agents' tools describe themselves at length there."""
NAMED = (
    "$defs", "definitions", "dependentRequired", "dependentSchemas", "patternProperties", "properties",
)  # keys over names of the user  # fmt: skip
MAX_CHARACTERS = 128 * 1024  # limit for a schema, an expression, a grammar, or all choices together
MAX_CHOICES = 1000
SPECIAL_IN_REGEX = frozenset(r"\.+*?()|[]{}^$")


@dataclass(frozen=True)
class Structure:
    """The texts that an answer may have. Equal structures are compiled once."""

    kind: Literal["json", "regex", "lark", "ebnf"]
    text: str  # a JSON schema, a regular expression or a grammar


def structure_of(asked: Mapping[str, Any]) -> Structure | None:
    """Return the Structure among the keywords of `generate`; None where the text is free.

    Raises:
        OptionError: two of the keywords at once, or a response format that does not exist.
        InputError: a schema, an expression, a grammar or a choice that cannot be read.
    """
    given = [name for name in KEYWORDS if asked.get(name) is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} both define the allowed texts: give one of them")
    if not given:
        return None
    value = asked[given[0]]
    structure = _READERS[given[0]](value)
    if structure is not None and len(structure.text) > MAX_CHARACTERS:
        raise InputError(f"{given[0]} has {len(structure.text)} characters: at most {MAX_CHARACTERS} are served")
    return structure


def _response_format(value: Any) -> Structure | None:
    if hasattr(value, "model_json_schema"):  # a model of pydantic
        return _schema(value.model_json_schema())
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in FORMATS:
        raise OptionError(
            f'response_format must be {{"type": ...}} with one of {", ".join(FORMATS)}; got {_shown(value)}'
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema({"type": "object"})
    described = value.get("json_schema")
    if not isinstance(described, Mapping) or "schema" not in described:
        raise InputError('response_format json_schema needs {"json_schema": {"name": ..., "schema": {...}}}')
    return _schema(described["schema"])


def _schema(schema: Any) -> Structure:
    """Return the Structure of a JSON schema: a mapping, or the same as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InputError(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InputError(f"a JSON schema is an object, not {_shown(schema)}")
    try:
        return Structure("json", json.dumps(without_annotations(schema)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema cannot be written as JSON: {error}") from None


def json_rule(schema: Any) -> str:
    """Return a JSON schema as the right side of a rule in the library's grammar language."""
    return f"%json {json.dumps({**without_annotations(schema), 'x-guidance': JSON_OPTIONS})}"


def without_annotations(schema: Any) -> Any:
    """Return the JSON schema without the keys that bind nobody: they are not a part of the grammar. So are values of
    `format` that the library does not know (JSON Schema 2020-12, Validation, section 7)."""
    if isinstance(schema, list):
        return [without_annotations(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ANNOTATIONS or (key == "format" and str(value) not in TEXT_FORMATS):
            continue
        if key in NAMED and isinstance(value, Mapping):
            kept[key] = {name: without_annotations(one) for name, one in value.items()}
        else:
            kept[key] = value if key in DATA else without_annotations(value)
    return kept


def _grammar(value: Any) -> Structure:
    text = _text("grammar", value)
    return Structure("ebnf" if "::=" in text else "lark", text)


def _choice(value: Any) -> Structure:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(f"choice must be a list of texts, got {_shown(value)}")
    if len(value) > MAX_CHOICES:
        raise InputError(f"choice has {len(value)} texts: at most {MAX_CHOICES} are served")
    texts = [_text(f"choice {number}", item) for number, item in enumerate(value, start=1)]
    return Structure("regex", "|".join(map(_escape, dict.fromkeys(texts))))


_READERS = {
    "response_format": _response_format,
    "regex": lambda value: Structure("regex", _text("regex", value)),
    "grammar": _grammar,
    "choice": _choice,
}


def _escape(text: str) -> str:
    """Return a regular expression that matches this text only."""
    return "".join(f"\\{character}" if character in SPECIAL_IN_REGEX else character for character in text)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a text that is not empty, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{name} is not valid Unicode") from None
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
