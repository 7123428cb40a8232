"""The messages of a chat, in the one form that chat templates are given. Messages of clients and of training
files are brought into it here.

This module knows no tokenizer and no template.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eyas.errors import InputError, near
from eyas.files import parse_json

Message = Mapping[str, Any]
Fields = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have; a chat template may refuse some of them."""
OLD_ROLES = {"function": "tool"}  # of OpenAI's API before it had tools
SILENT_ROLES = ("assistant", "tool")  # those whose messages may have no content
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one key, of which templates read one or another
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", None: "text"}
"""Type of a content part that is text (None: it has no type) -> the key that holds the text."""


def check_messages(messages: Sequence[Message], media: Collection[str] = ()) -> list[Fields]:
    """Return the messages as new dicts in the form that chat templates read:

        content       a string; the texts of content parts are joined by line breaks, as vLLM does. "" where a
                      message of the assistant's or a tool's has none. With `media`, a list of content parts, their texts
                      under "text"
        tool_calls    calls with `function`, whose `arguments` are an object. Anything but an object stays what the model
                      wrote: text that was cut, for instance. Nothing is an empty object; an empty list of calls is
                      left out. The older `function_call` and the role `function` become a call and a tool's message
        other keys    as they are; those that are None are left out

    Args:
        media: types of content parts that are allowed besides text; ("text",): content is parts of text.

    Raises:
        InputError: a message is malformed; the error names its number.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InputError(f'messages must be a list of {{"role": ..., "content": ...}}, this is {kind_of(messages)}')
    if not messages:
        raise InputError("the list of messages is empty: give at least one message")
    return [_message(message, number, media) for number, message in enumerate(messages, start=1)]


def _message(message: Any, number: int, media: Collection[str]) -> Fields:
    if not isinstance(message, Mapping):
        raise InputError(f'message {number} must be a dict with "role" and "content", it is {kind_of(message)}')
    role = _role(message, number)
    if "content" not in message and role not in SILENT_ROLES:
        raise InputError(f'message {number} has no "content": every message needs "role" and "content"')
    content = _content(message.get("content"), role, number, media)
    calls = _calls(message, number)
    left_out = ("tool_calls", "function_call") if "tool_calls" in message or calls else ()
    kept = {key: value for key, value in message.items() if value is not None and key not in left_out}
    return {**kept, "role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _role(message: Message, number: int) -> str:
    if "role" not in message:
        raise InputError(f'message {number} has no "role": every message needs "role" and "content"')
    role = message["role"]
    if not isinstance(role, str):
        raise InputError(f'the "role" of message {number} must be a string, it is {kind_of(role)}')
    role = OLD_ROLES.get(role, role)
    if role not in ROLES:
        raise InputError(f"message {number} has the unknown role {role[:100]!r}; {near(role[:100], ROLES)}")
    return role


def _content(content: Any, role: str, number: int, media: Collection[str]) -> Any:
    """Return the text of a message; with `media`, its parts."""
    if not content and not isinstance(content, str) and role in SILENT_ROLES:
        content = ""
    if isinstance(content, list | tuple):
        if not content:
            raise InputError(f"the content of message {number} is empty")
        parts = [_part(part, place, number, media) for place, part in enumerate(content, start=1)]
    elif isinstance(content, str):
        parts = [_text_part(content, f"the content of message {number}")]
    else:
        raise InputError(f'the "content" of message {number} must be a string, it is {kind_of(content)}')
    return parts if media else "\n".join(part["text"] for part in parts)


def _part(part: Any, place: int, number: int, media: Collection[str]) -> Fields:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in media and kind != "text":
        return dict(part)
    name = TEXT_PARTS.get(kind) if isinstance(part, Mapping) and isinstance(kind, str | None) else None
    if name is None or (kind is None and name not in part):
        named = f"of type {kind!r}" if kind else f"{kind_of(part)} without a type"
        allowed = "parts of text and images are" if {*media} - {"text"} else "parts of text are"
        raise InputError(
            f'part {place} of message {number} is {named}: only {allowed} read here, {{"type": "text", "text": ...}}'
        )
    if not isinstance(part.get(name), str):
        raise InputError(f'part {place} of message {number} has no "{name}" that is a string')
    return _text_part(part[name], f"the content of message {number}")


def _text_part(text: str, name: str) -> Fields:
    check_unicode(text, name)
    return {"type": "text", "text": text}


def _calls(message: Message, number: int) -> list[Fields]:
    calls = message.get("tool_calls") or message.get("function_call") or ()
    calls = [calls] if isinstance(calls, Mapping) and not message.get("tool_calls") else calls
    if not isinstance(calls, list | tuple):
        raise InputError(f'the "tool_calls" of message {number} must be a list, it is {kind_of(calls)}')
    return [_call(call, place, number) for place, call in enumerate(calls, start=1)]


def _call(call: Any, place: int, number: int) -> Fields:
    whole = call if isinstance(call, Mapping) else {}
    outer = {key: value for key, value in whole.items() if value is not None}
    if "function" not in outer:  # a call without its frame, as in older data
        names = ("name", "arguments")
        inner = {key: outer[key] for key in names if key in outer}
        outer = {**{key: outer[key] for key in outer if key not in names}, "function": inner}
    function = outer["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(
            f"call {place} of message {number} must be "
            '{"type": "function", "function": {"name": "...", "arguments": "..."}}'
        )
    outer.setdefault("type", "function")
    return {**outer, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}


def read_arguments(given: Any) -> Any:
    """Return a call's arguments as the value that their JSON holds, and other text as it is."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return given
    try:
        return read_arguments(parse_json(given))  # again, for clients that encode them twice
    except InputError:
        return given


def template_keywords(record: Mapping[str, Any]) -> Fields:
    """Return the keywords of `render` that stand next to the messages in a line of a file: `tools` or
    `functions`, a list or its JSON, and `chat_template_kwargs`."""
    tools = _parsed(record.get("tools") or record.get("functions"))
    if not isinstance(tools, list | None) or not all(isinstance(tool, Mapping) for tool in tools or ()):
        raise InputError('"tools" must be a list of {"type": "function", "function": {"name": ...}}')
    variables = _parsed(record.get("chat_template_kwargs"))
    if not isinstance(variables, Mapping | None):
        raise InputError('"chat_template_kwargs" must be an object, the variables of the chat template')
    bare = [tool for tool in tools or () if "name" in tool and "function" not in tool]
    framed = [{"type": "function", "function": tool} if tool in bare else dict(tool) for tool in tools or ()]
    return {**({"tools": framed} if framed else {}), **({"chat_template_kwargs": dict(variables)} if variables else {})}


def _parsed(given: Any) -> Any:
    try:
        return parse_json(given) if isinstance(given, str) and given.strip() else given or None
    except InputError:
        return given


def check_unicode(text: str, name: str) -> None:
    """Raise InputError, which calls the text `name`, where it holds half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid Unicode: half a surrogate pair at character {error.start}") from None


def kind_of(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
