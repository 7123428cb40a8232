"""The body of POST /v1/responses, and its items as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import InputError
from eyas.serve.errors import ApiError
from eyas.serve.protocol.chat import ChatBody
from eyas.serve.protocol.fields import GenerationBody

__all__ = ["ResponsesBody", "messages_of"]

TEXTS = ("input_text", "output_text", "text")
READ = "messages, calls of functions, their outputs, and reasoning are read here"
NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
"""What a response can include and never has here: tools of a server's own, encrypted reasoning."""


class TextOptions(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(BaseModel):
    """How much the model reasons. A summary is never made: reasoning is answered as it is."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(GenerationBody):
    """A text or a conversation, with instructions before it."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # limits the server's own tools: there are none
    # the fields below are accepted only with values that change nothing
    conversation: None = None
    include: list[str] | None = None
    prompt: None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        if self.n not in (None, 1):
            raise ApiError(400, "a response has one text: leave n out", param="n")
        if others := [name for name in self.include or () if name not in NOTHING_TO_INCLUDE]:
            raise ApiError(400, f"include: this server does not support {others[0]}: leave it out", param="include")

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, items: Sequence[dict[str, Any]]) -> ChatBody:
        """Return the same request as a chat, with these items as its conversation, which ends with `items()`.

        Raises:
            InputError: an item that cannot be read.
            ApiError: a tool that is not a function.
        """
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages, places = messages_of(items, len(items) - len(self.items()))
        asked = self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens
        fields = {name: getattr(self, name) for name in GenerationBody.model_fields}
        own = {
            "messages": [*head, *messages],
            "max_tokens": asked,
            "response_format": self.response_form(),
            "tools": None if self.tools is None else [_nest(tool, n) for n, tool in enumerate(self.tools, start=1)],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_construct(**{**fields, **own}).placed(
            [*(["the instructions"] if head else []), *places], self
        )

    def response_form(self) -> dict[str, Any] | None:
        """Return `text.format` as the `response_format` of a chat."""
        form = self.text.format if self.text else None
        if form is None or form.get("type") != "json_schema":
            return self.response_format if form is None else form
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def messages_of(items: Sequence[dict[str, Any]], before: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """Return items as the messages of a chat, and the place of each in the input. Reasoning, a text and calls in a
    row are one turn of the assistant's, whose place is that of its last item.

    Args:
        before: how many of the first items belong to earlier responses.

    Raises:
        InputError: an item that cannot be read.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for number, item in enumerate(items, start=1 - before):
        place = f"input item {number}" if number > 0 else "an earlier response"
        message = _message(item, place)
        if message and messages and _goes_on(messages[-1], message):
            messages[-1] = _joined(messages[-1], message)
            places[-1] = place
        elif message:
            messages.append(message)
            places.append(place)
    return messages, places


def _joined(turn: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn of the assistant's with what goes on in it."""
    calls = [*turn.get("tool_calls", ()), *message.get("tool_calls", ())]
    new = {key: value for key, value in message.items() if value}
    return {**turn, **new, **({"tool_calls": calls} if calls else {})}


def _goes_on(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether a message belongs to the assistant's turn that the last one began."""
    if not last["role"] == message["role"] == "assistant":
        return False
    if "tool_calls" in message:
        return True
    return not last.get("content") and "tool_calls" not in last and "reasoning_content" not in message


def _message(item: dict[str, Any], place: str) -> dict[str, Any]:
    """Return an item as a message; {} for reasoning that is empty. Keys that a message does not have are from earlier
    responses."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    if kind == "reasoning":
        lists = [part for part in (item.get("content"), item.get("summary")) if isinstance(part, list)]
        parts = [part for one in lists for part in one]
        text = "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
        return {"role": "assistant", "content": "", "reasoning_content": text} if text else {}
    if kind == "function_call" and isinstance(item.get("name"), str):
        function = {"name": item["name"], "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    raise InputError(f"{place} is of type {kind!r}: {READ}")


def _content(content: Any) -> Any:
    return [_part(part) for part in content] if isinstance(content, list) else content


def _part(part: Any) -> Any:
    """Return a part of an item's content as one of a chat; others are refused where the chat is read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS:
        return {"type": "text", "text": part.get("text")}
    return {"type": "image_url", "image_url": part.get("image_url")} if kind == "input_image" else part


def _nest(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a tool in the form of chats."""
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"tool {number} is of type {tool.get('type')!r}: only functions are served here, so turn it off in the client",
            param="tools",
        )
    return (
        tool if "function" in tool else {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    )
