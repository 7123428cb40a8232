"""vLLM's names for structured output, as keywords of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.errors import OptionError

__all__ = ["STRUCTURE_FIELDS", "structure_keywords"]

# older names
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURE_FIELDS = ("structured_outputs", *GUIDED)
NAMES = ("json", "regex", "choice", "grammar", "json_object")
CHANGE_NOTHING = (None, False)  # values with which further names are left out


def structure_keywords(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that `structured_outputs` and the older guided names of a body mean.

    Raises:
        OptionError: a name that is not served, or a value of another type.
    """
    given = {ours: fields[name] for name, ours in GUIDED.items() if fields.get(name) is not None}
    outputs = fields.get("structured_outputs")
    if outputs is not None and not isinstance(outputs, Mapping):
        raise OptionError(f"structured_outputs must be an object with one of {', '.join(NAMES)}")
    for name, value in (outputs or {}).items():
        if name in NAMES and value not in CHANGE_NOTHING:
            given[name] = value
        elif value not in CHANGE_NOTHING:
            raise OptionError(f"structured_outputs: this server does not support {name}: leave it out")
    keywords = {name: value for name, value in given.items() if name not in ("json", "json_object")}
    if "json" in given:
        keywords["response_format"] = {"type": "json_schema", "json_schema": {"schema": given["json"]}}
    elif given.get("json_object"):
        keywords["response_format"] = {"type": "json_object"}
    return keywords
