"""The body of POST /v1/responses, as far as it needs no memory of earlier responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import InputError
from eyas.serve.protocol.fields import GenerationBody

__all__ = ["ResponsesBody"]

TEXTS = ("input_text", "output_text", "text")


class TextOptions(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(GenerationBody):
    """A text or a conversation, with instructions before it."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    # the fields below are accepted only with values that change nothing
    conversation: None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: None = None
    reasoning: None = None
    tool_choice: Literal["auto", "none"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as messages of a chat.

        Raises:
            InputError: an item that is no message.
        """
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*head, {"role": "user", "content": self.input}]
        return [*head, *(_message(item, number) for number, item in enumerate(self.input, start=1))]

    def response_form(self) -> dict[str, Any] | None:
        """`text.format` as the `response_format` of a chat."""
        form = self.text.format if self.text else None
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _message(item: dict[str, Any], number: int) -> dict[str, Any]:
    """An input item as a message; other keys than role and content are those of earlier responses."""
    kind = item.get("type", "message")
    if kind != "message":
        raise InputError(f"input item {number} is of type {kind!r}: this server reads messages only")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    return {"role": item.get("role"), "content": content}


def _part(part: Any) -> Any:
    """A part of an item's content as one of a chat; others are refused where the chat is read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS:
        return {"type": "text", "text": part.get("text")}
    return {"type": "image_url", "image_url": part.get("image_url")} if kind == "input_image" else part
