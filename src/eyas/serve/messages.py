"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect, as a translation to a chat.

Its stream is a sequence of typed events:

    message_start
        content_block_start                  for each block: thinking, text, tool_use
            content_block_delta ...          thinking_delta, text_delta, input_json_delta
        content_block_stop
    message_delta                            the reason of the end, and usage
    message_stop

The whole dialect is in this file, but for its errors (`errors.py`) and its routes in `app.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from eyas.errors import InputError
from eyas.serve.chat import Chat, ChatBody, prepare, prompt_of
from eyas.serve.errors import ApiError, JsonObject, bad_request, invalid_body
from eyas.serve.fields import Body, Positive, Strict
from eyas.serve.http import request_id
from eyas.serve.reply import Block, BlockWriter, Events, event, reply
from eyas.serve.service import Service
from eyas.serve.tools import tools_of
from eyas.text import read_arguments

READ = "text, images, tool_use, tool_result and thinking are read here"
WITHOUT_EFFECT = (
    "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip


class Form(Strict):
    """The form of the answer."""

    type: str | None = None
    schema_: Any = Field(None, alias="schema")


class Output(Strict):
    """How the answer is made."""

    effort: str | None = None
    format: Form | None = None


class Thinking(Strict):
    """Whether the model thinks first."""

    type: str | None = None
    budget_tokens: int | None = None


class Context(Strict):
    """The edits of a long conversation, which this server does not make."""

    edits: list[JsonObject] | None = None


class CountBody(Body):
    """Read a conversation in Anthropic's form. Further fields have the meaning that they have in a chat:
    `seed`, `drafting`, `min_p`, ..."""

    model: str
    messages: Annotated[list[JsonObject], Field(min_length=1)]
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    thinking: Thinking | None = None
    output_config: Output | None = None
    output_format: Form | None = None
    # fields of Anthropic's servers, accepted only if they are empty
    container: Any = None
    mcp_servers: Any = None
    context_management: Context | None = None  # accepted if it keeps all

    def check(self) -> None:
        """Refuse fields of Anthropic's servers; the chat checks the others."""
        edits = (self.context_management.edits if self.context_management else None) or ()
        kept = all(edit.get("keep") == "all" for edit in edits)
        for name in ("container", "mcp_servers", *(() if kept else ("context_management",))):
            if getattr(self, name) not in (None, [], {}):
                raise bad_request(f"this server does not support {name}: leave it out", name)

    @property
    def ignored(self) -> list[str]:
        others = [name for name in self.chat().ignored if name not in WITHOUT_EFFECT]
        return sorted([*others, *(["thinking.budget_tokens"] if self.thinking and self.thinking.budget_tokens else [])])

    def chat(self) -> ChatBody:
        """Return the same request as a chat."""
        made = [*_system(self.system), *_messages(self.messages)]
        messages = [message for message, _ in made]
        if not messages:
            raise InputError("the messages are empty: give at least one with content")
        output = self.output_config or Output()
        fields = {
            "messages": messages,
            "tools": [_tool(tool, number) for number, tool in enumerate(self.tools or (), start=1)] or None,
            "tool_choice": self.tool_choice,
            "response_format": _form(self.output_format or output.format),
            # high is what Anthropic's models do unless told
            "reasoning_effort": None if output.effort == "high" else output.effort,
            "chat_template_kwargs": _thinking(self.thinking),
            # an assistant's message at the end is the beginning of the answer
            "continue_final_message": messages[-1]["role"] == "assistant" or None,
        }
        try:
            chat = ChatBody.model_validate({"model": self.model, **(self.model_extra or {}), **fields, **self.limits()})
        except ValidationError as error:
            raise invalid_body(error) from None
        chat.check()
        for name in ("return_token_ids", "return_meta_info"):
            if getattr(chat, name):
                raise bad_request(f"messages do not support {name}: leave it out", name)
        return chat.placed([place for _, place in made], self)

    def limits(self) -> JsonObject:
        """Return the fields of a chat that bound an answer: none, because nothing is generated."""
        return {}


class MessagesBody(CountBody):
    """A conversation that is answered."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def limits(self) -> JsonObject:
        """Return the fields of a chat that bound an answer, under OpenAI's names."""
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences or None}


async def messages(service: Service, request: Request, body: MessagesBody) -> Response:
    """Answer POST /v1/messages."""
    writer = Writer(await prepare(service, body.chat()), request_id(request.scope))
    return await reply(service, request, writer, bool(body.stream), body.response_headers)


async def count_tokens(service: Service, request: Request, body: CountBody) -> Response:
    """Answer POST /v1/messages/count_tokens."""
    chat = body.chat()
    service.model_name(chat.model)
    tools = tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    prompt = await service.in_worker(prompt_of, service, chat.messages, chat, tools)
    return JSONResponse({"input_tokens": len(prompt.ids)}, headers=body.response_headers)


# --- from Anthropic's form to a chat's -------------------------------------------------------------


Placed = tuple[JsonObject, str]  # a message of a chat, and what it is of the request


def _system(system: str | list[JsonObject] | None) -> list[Placed]:
    if not system:
        return []
    content = system if isinstance(system, str) else [_part(block, "the system text") for block in system]
    return [({"role": "system", "content": content}, "the system text")]


def _messages(messages: list[JsonObject]) -> Iterator[Placed]:
    """Yield the messages of a chat: a result of a tool is one of its own."""
    for number, message in enumerate(messages, start=1):
        role, content, place = message.get("role"), message.get("content"), f"message {number}"
        if not isinstance(content, list):
            yield {"role": role, "content": content}, place
            continue
        blocks = [block if isinstance(block, dict) else {} for block in content]
        if role == "assistant":
            yield _turn(blocks, place), place
            continue
        for block in blocks:
            if block.get("type") == "tool_result":
                yield _result(block, f"the tool_result of {place}"), f"the tool_result of {place}"
        if parts := [_part(block, place) for block in blocks if block.get("type") != "tool_result"]:
            yield {"role": role, "content": parts}, place


def _result(block: JsonObject, place: str) -> JsonObject:
    result = block.get("content") or ""
    text = [_part(part, place) for part in result] if isinstance(result, list) else result
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _turn(blocks: list[JsonObject], place: str) -> JsonObject:
    """Return a turn of the assistant's as a chat's message: its thinking, its text and its calls."""
    of = {kind: [block for block in blocks if block.get("type") == kind] for kind in ("thinking", "tool_use")}
    others = [block for block in blocks if block.get("type") not in (*of, "redacted_thinking")]
    turn: JsonObject = {"role": "assistant", "content": [_part(one, place) for one in others] or ""}
    if thinking := "\n".join(str(block.get("thinking") or "") for block in of["thinking"]):
        turn["reasoning_content"] = thinking
    if of["tool_use"]:
        turn["tool_calls"] = [
            {"id": one.get("id"), "type": "function", "function": {"name": one.get("name"), "arguments": one.get("input")}}
            for one in of["tool_use"]
        ]  # fmt: skip
    return turn


def _part(given: Any, place: str) -> JsonObject:
    block = given if isinstance(given, dict) else {}
    source = block.get("source")
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text")}
    if block.get("type") == "image" and isinstance(source, dict):
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise InputError(f"{place} has a block of type {block.get('type')!r}: {READ}")


def _tool(tool: JsonObject, number: int) -> JsonObject:
    if tool.get("type", "custom") not in ("custom", None):
        raise bad_request(f"tool {number} is of type {tool['type']!r}, which is not served: leave it out", "tools")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _form(form: Form | None) -> JsonObject | None:
    if form is None:
        return None
    return {"type": form.type, "json_schema": {"name": "answer", "schema": form.schema_}}


def _thinking(thinking: Thinking | None) -> JsonObject | None:
    """Return the template's variable of models that can think and need not; others do not know it."""
    kind = thinking and thinking.type
    return {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else None


# --- from an answer to Anthropic's form ------------------------------------------------------------


class Writer(BlockWriter):
    """An answer in the form of Anthropic's messages."""

    def __init__(self, chat: Chat, identity: str) -> None:
        super().__init__(chat.job, chat.model, chat.new_reader())
        self.identity = identity

    def message(self) -> JsonObject:
        return {
            **self._head(),
            "content": [_block(one) for one in self.blocks],
            **self._end_of(),
            "usage": self._usage(),
        }

    def begun(self) -> Events:
        usage = {"input_tokens": len(self.job.prompts[0]), "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=message)

    def opened(self, block: Block) -> Events:
        yield _event("content_block_start", index=block.number, content_block=_block(block))

    def grown(self, block: Block, text: str) -> Events:
        delta = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        yield _event("content_block_delta", index=block.number, delta=delta)

    def closed(self, block: Block) -> Events:
        yield _event("content_block_stop", index=block.number)

    def ended(self) -> Events:
        yield _event("message_delta", delta=self._end_of(), usage=self._usage())
        yield _event("message_stop")

    def arguments(self, text: str) -> str:
        """Return an object of JSON, which may be text within JSON; {} for other values."""
        value = read_arguments(text)
        try:
            return json.dumps(value if isinstance(value, dict) else {}, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return "{}"

    def failed(self, error: ApiError) -> bytes:
        return event(error.body(anthropic=True), name="error")

    def _head(self) -> JsonObject:
        return {"id": f"msg_{self.identity}", "type": "message", "role": "assistant", "model": self.model}

    def _end_of(self) -> JsonObject:
        """Return why the message ends; a stop string of the request's is named."""
        stop = self.totals.stop_reason
        if self.called:
            reason = "tool_use"
        elif self.totals.finish == "length":
            reason = "max_tokens"
        else:
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, int]:
        """Return token counts. Tokens that were not read again count apart, as with Anthropic."""
        prompt, cached = len(self.job.prompts[0]), self.totals.cached_tokens
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(self.totals.token_ids),
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, name=kind)


def _block(block: Block) -> JsonObject:
    """Return a block of content as far as it has come. The input of a call that begins is empty."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": json.loads(block.text or "{}")}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
