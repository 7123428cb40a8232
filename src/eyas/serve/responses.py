"""POST /v1/responses: OpenAI's newer dialect. `eyas.serve.memory` has the last conversations, for clients
that name an earlier response or an item of one.

Its stream is a sequence of typed events:

    response.created  response.in_progress
        response.output_item.added                    for each item: reasoning, a message, a call
            response.content_part.added               (not of calls)
                response.output_text.delta ...        or reasoning_text, or function_call_arguments
                response.output_text.done
            response.content_part.done
        response.output_item.done
    response.completed, or response.incomplete where the text was cut at its length
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fastapi import Request, Response

from eyas.errors import InputError
from eyas.serve.auth import owner_of
from eyas.serve.chat import Chat, ChatBody, prepare
from eyas.serve.errors import ApiError, JsonObject, bad_request
from eyas.serve.fields import GenerationBody, Positive, Strict
from eyas.serve.memory import Memory
from eyas.serve.reply import Block, BlockWriter, Events, event, reply, usage_of
from eyas.serve.service import Service

TEXT_PARTS = ("input_text", "output_text", "text")
READ = "messages, calls of functions, their outputs, and reasoning are read here"
NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
"""What a response can include and never has here: tools of a server's own, encrypted reasoning."""
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}  # how the ids of items begin
TEXTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class TextOptions(Strict):
    """The form of the text."""

    format: JsonObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """How much the model reasons. A summary is never made: reasoning is answered as it is."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(GenerationBody):
    """A text or a conversation, with instructions before it."""

    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    text: TextOptions | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    max_tool_calls: int | None = None  # limits the server's own tools: there are none
    # the fields below are accepted only with values that change nothing
    conversation: None = None
    include: list[str] | None = None
    prompt: None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were given and have no effect; `store` has one here."""
        return [name for name in super().ignored if name != "store"]

    def check(self) -> None:
        """Refuse fields that this server does not serve."""
        super().check()
        if self.n not in (None, 1):
            raise bad_request("a response has one text: leave n out", "n")
        if others := [name for name in self.include or () if name not in NOTHING_TO_INCLUDE]:
            raise bad_request(f"include: this server does not support {others[0]}: leave it out", "include")

    def items(self) -> list[JsonObject]:
        """Return the input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def chat(self, items: Sequence[JsonObject]) -> ChatBody:
        """Return the same request as a chat, with these items as its conversation, which ends with `items()`."""
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
            "verbosity": self.text.verbosity if self.text else None,
            "store": None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_construct(**{**fields, **own}).placed(
            [*(["the instructions"] if head else []), *places], self
        )

    def response_form(self) -> JsonObject | None:
        """Return `text.format` as the `response_format` of a chat."""
        form = self.text.format if self.text else None
        if form is None or form.get("type") != "json_schema":
            return self.response_format if form is None else form
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def messages_of(items: Sequence[JsonObject], before: int = 0) -> tuple[list[JsonObject], list[str]]:
    """Return items as messages, and the place of each in the input. Reasoning, a text and calls in a row are one
    turn. `before`: how many of the first items belong to earlier responses."""
    messages: list[JsonObject] = []
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


def _joined(turn: JsonObject, message: JsonObject) -> JsonObject:
    calls = [*turn.get("tool_calls", ()), *message.get("tool_calls", ())]
    new = {key: value for key, value in message.items() if value}
    return {**turn, **new, **({"tool_calls": calls} if calls else {})}


def _goes_on(last: JsonObject, message: JsonObject) -> bool:
    """Return whether a message belongs to the assistant's turn that the last one began."""
    if not last["role"] == message["role"] == "assistant":
        return False
    if "tool_calls" in message:
        return True
    return not last.get("content") and "tool_calls" not in last and "reasoning_content" not in message


def _message(item: JsonObject, place: str) -> JsonObject:
    """Return an item as a message; {} for empty reasoning. Further keys are from earlier responses."""
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
    return [_chat_part(part) for part in content] if isinstance(content, list) else content


def _chat_part(part: Any) -> Any:
    """Return a part of an item's content as one of a chat; others are refused where the chat is read."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_PARTS:
        return {"type": "text", "text": part.get("text")}
    return {"type": "image_url", "image_url": part.get("image_url")} if kind == "input_image" else part


def _nest(tool: JsonObject, number: int) -> JsonObject:
    if tool.get("type") != "function":
        raise bad_request(
            f"tool {number} is of type {tool.get('type')!r}: only functions are served here, so turn it off in the client",
            "tools",
        )
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


async def respond(service: Service, request: Request, body: ResponsesBody) -> Response:
    """Answer POST /v1/responses."""
    memory, owner = service.memory, owner_of(request.headers)
    items = _conversation(memory, owner, body)
    made = await prepare(service, body.chat(items))

    def keep(identity: str, output: list[JsonObject]) -> None:
        if body.store is not False:
            memory.keep(owner, identity, [*items, *output])

    return await reply(service, request, Writer(made, body, keep), bool(body.stream), body.response_headers)


def _conversation(memory: Memory, owner: str, body: ResponsesBody) -> list[JsonObject]:
    """Return the items of the request after an earlier response's, and with the items that it names."""
    hint = f"this server remembers the last {memory.max_responses} responses: send the whole conversation, with store set to false"
    before: Sequence[JsonObject] = ()
    if body.previous_response_id is not None:
        known = memory.conversation(owner, body.previous_response_id)
        if known is None:
            message = f"there is no response {body.previous_response_id!r}; {hint}"
            raise bad_request(message, "previous_response_id", code="previous_response_not_found")
        before = known
    items = [*before, *body.items()]
    for place, item in enumerate(items):
        if item.get("type") == "item_reference":
            found = memory.item(owner, str(item.get("id")))
            if found is None:
                raise bad_request(f"there is no item {item.get('id')!r} to refer to; {hint}", "input")
            items[place] = found
    return items


class Writer(BlockWriter):
    """An answer in the form of OpenAI's responses."""

    def __init__(self, chat: Chat, body: ResponsesBody, keep: Callable[[str, list[JsonObject]], None]) -> None:
        super().__init__(chat.job, chat.model, chat.new_reader())
        self.body = body
        self.keep = keep
        self.identity = uuid.uuid4().hex
        self.created = int(time.time())
        self._number = -1  # number of the last event

    def message(self) -> JsonObject:
        cut = self.totals.finish == "length"
        status = "incomplete" if cut else "completed"
        output = [self._item(block, status) for block in self.blocks]
        self.keep(f"resp_{self.identity}", output)
        return {
            **self._head(status),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": self._usage(),
            "metrics": {"speculative_decoding": self.totals.acceptance()},
        }

    def _head(self, status: str) -> JsonObject:
        """Return the response object without the generated items."""
        body, keywords = self.body, self.job.keywords
        effort, summary = (body.reasoning.effort, body.reasoning.summary) if body.reasoning else (None, None)
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": summary},
            "store": body.store is not False,
            "temperature": keywords["temperature"],
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": (body.model_extra or {}).get("metadata") or {},
        }

    def begun(self) -> Events:
        yield self._event("response.created", response=self._head("in_progress"))
        yield self._event("response.in_progress", response=self._head("in_progress"))

    def opened(self, block: Block) -> Events:
        item = {**self._item(block, "in_progress"), **({} if block.kind == "call" else {"content": []})}
        yield self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=_part(block))

    def grown(self, block: Block, text: str) -> Events:
        yield self._event(f"{TEXTS[block.kind]}.delta", **self._place(block), delta=text, **_logprobs(block))

    def closed(self, block: Block) -> Events:
        done = f"{TEXTS[block.kind]}.done"
        if block.kind == "call":
            yield self._event(done, **self._place(block), name=block.name, arguments=block.text)
        else:
            yield self._event(done, **self._place(block), text=block.text, **_logprobs(block))
            yield self._event("response.content_part.done", **self._place(block), part=_part(block))
        status = "incomplete" if self.totals.finish == "length" else "completed"
        yield self._event("response.output_item.done", output_index=block.number, item=self._item(block, status))

    def ended(self) -> Events:
        whole = self.message()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or str(error.status), message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, name=kind)

    def _place(self, block: Block) -> JsonObject:
        place = {"item_id": self._name(block), "output_index": block.number}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _name(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self.identity}_{block.number}"

    def _item(self, block: Block, status: str) -> JsonObject:
        head = {"id": self._name(block), "status": status}
        if block.kind == "call":
            return {
                "type": "function_call", **head, "call_id": block.call_id, "name": block.name, "arguments": block.text,
            }  # fmt: skip
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": [_part(block)]}
        return {"type": "message", **head, "role": "assistant", "content": [_part(block)]}

    def _usage(self) -> JsonObject:
        usage = usage_of(self.job, [self.totals], self.reader.reasoning_tokens)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.totals.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reader.reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _part(block: Block) -> Mapping[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, list[Any]]:
    return {"logprobs": []} if block.kind == "text" else {}
