"""Functions that the model may call: OpenAI's `tools` and `tool_choice`.

the prompt      the tokenizer's chat template writes the tools into it; a template that leaves them out is refused
auto            the model decides whether it calls; `eyas.serve.reading` finds the calls
required, or    a grammar lets the model write nothing but one call, with arguments of the function's schema
a function
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.core.sockets import STRUCTURE
from eyas.serve.errors import JsonObject, bad_request
from eyas.text import has_place_for_tools

Tool = Mapping[str, Any]
ANY_CALL = ("auto", "none", "required")
WORDS = {"any": "required", **{word: word for word in ANY_CALL}}  # Anthropic and Mistral say any
UNKNOWN_CHOICE = f'tool_choice must be {", ".join(ANY_CALL)} or {{"type": "function", "function": {{"name": ...}}}}'


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call."""

    listed: tuple[Tool, ...] = ()  # the functions, in OpenAI's form, of which the model is told
    forced: tuple[str, ...] = ()  # functions one of which must be called
    parallel: bool = True  # whether several calls may be made

    def constrain(self, keywords: JsonObject) -> None:
        """Hold the answer to a forced call, in the keywords of a Job. Refuse other structure, which forbids calls."""
        form = {"response_format": keywords.get("response_format")}
        if self.forced:
            keywords.pop("response_format", None)
            if STRUCTURE.plug_for("tool_choice").structure_of(keywords) is not None:
                raise bad_request("a tool_choice that forces a call excludes other structured output", "tool_choice")
            keywords["grammar"] = self.grammar()
        elif self.listed and any(form.values()) and STRUCTURE.plug_for("response_format").structure_of(form):
            raise bad_request(
                "tools and a response_format in one request are not served: the format would forbid every call. Leave "
                "one out, or set tool_choice to required or none",
                "response_format",
            )

    def grammar(self) -> str:
        """Return the grammar of one call of a forced function, in Lark's form."""
        functions = {tool["function"]["name"]: tool["function"] for tool in self.listed}
        calls, rules = [], []
        json_rule = STRUCTURE.plug_for("tool_choice").json_rule
        for number, name in enumerate(self.forced):
            schema = functions[name].get("parameters") or {
                "type": "object",
                "properties": {},
                "additionalProperties": False,
            }
            opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            calls.append(f"call_{number}")
            rules.append(f'call_{number}: {opening} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: {json_rule(schema)}")
        return "\n".join([f"start: {' | '.join(calls)}", *rules])


def tools_of(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> Tools:
    """Return the Tools of a body's fields `tools`, `tool_choice` and `parallel_tool_calls`."""
    listed = tuple(_check(tool, number) for number, tool in enumerate(tools or (), start=1))
    if isinstance(choice, Mapping):
        parallel = False if choice.get("disable_parallel_tool_use") else parallel  # Anthropic's place for it
        if choice.get("type") == "allowed_tools":
            listed, choice = _allow(listed, choice.get("allowed_tools", choice))
    choice, names = _plain(choice), [tool["function"]["name"] for tool in listed]
    if twice := {name for name in names if names.count(name) > 1}:
        raise bad_request(f"tools: the function {min(twice)!r} is there twice", "tools")
    if choice is None or choice in ANY_CALL:
        if choice == "required" and not names:
            raise bad_request("tool_choice is required, but there are no tools", "tool_choice")
        return Tools(
            () if choice == "none" else listed, tuple(names) if choice == "required" else (), parallel is not False
        )
    kind = "function" if choice in names else choice.get("type", "function") if isinstance(choice, Mapping) else None
    if kind not in ("function", "tool"):
        raise bad_request(UNKNOWN_CHOICE, "tool_choice")
    name = _name(choice)
    if name not in names:
        raise bad_request(f"tool_choice names the function {name!r}, which is not among the tools", "tool_choice")
    return Tools(listed, (str(name),), parallel is not False)


def _plain(choice: Any) -> Any:
    """Return a choice without a name as OpenAI's word for it: some clients write {"type": "auto"}, or another word."""
    word = choice.get("type") if isinstance(choice, Mapping) else choice
    return WORDS.get(word.lower(), choice) if isinstance(word, str) else choice


def _allow(listed: tuple[Tool, ...], choice: Any) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that OpenAI's `allowed_tools` leaves, and whether one of them must be called."""
    given = choice if isinstance(choice, Mapping) else {}
    tools, mode = given.get("tools"), given.get("mode", "auto")
    wanted = [_name(tool) for tool in tools] if isinstance(tools, list) else []
    known = [tool["function"]["name"] for tool in listed]
    if not wanted or mode not in ("auto", "required"):
        raise bad_request('tool_choice allowed_tools has a "mode", auto or required, and some "tools"', "tool_choice")
    if missing := [name for name in wanted if name not in known]:
        raise bad_request(
            f"tool_choice allows the function {missing[0]!r}, which is not among the tools", "tool_choice"
        )
    return tuple(tool for tool in listed if tool["function"]["name"] in wanted), mode


def _name(tool: Any) -> Any:
    """Return the name of a function in one of OpenAI's two forms, or alone; None without one."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    return inner.get("name") if isinstance(inner, Mapping) else inner


def _check(tool: Any, number: int) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request(f'tool {number} must be {{"type": "function", "function": {{"name": ...}}}}', "tools")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise bad_request(f"the parameters of the function {function['name']!r} must be a JSON schema", "tools")
    return tool  # type: ignore[no-any-return]


def written_tools(tokenizer: Any, tools: Tools) -> JsonObject:
    """Return the tools as a keyword of `text.render`; raise ApiError where the chat template has no place for them."""
    if not tools.listed:
        return {}
    if not has_place_for_tools(tokenizer, tools.listed):
        raise bad_request("this model's chat template has no place for tools: leave them out", "tools")
    return {"tools": tools.listed}
