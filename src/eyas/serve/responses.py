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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from eyas.serve.auth import owner_of
from eyas.serve.blocks import Block, BlockWriter, reply_in_blocks
from eyas.serve.chat import Chat, prepare
from eyas.serve.errors import ApiError
from eyas.serve.memory import Memory
from eyas.serve.protocol.responses import ResponsesBody
from eyas.serve.reply import usage_of
from eyas.serve.service import Service
from eyas.serve.stream import event

__all__ = ["respond"]

PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}  # how the ids of items begin
TEXTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


async def respond(service: Service, request: Request, body: ResponsesBody) -> Response:
    memory, owner = service.memory, owner_of(request.headers)
    items = _conversation(memory, owner, body)
    made = await prepare(service, body.chat(items))

    def keep(identity: str, output: list[dict[str, Any]]) -> None:
        if body.store is not False:
            memory.keep(owner, identity, [*items, *output])

    return await reply_in_blocks(service, request, Writer(made, body, keep), bool(body.stream), body.response_headers)


def _conversation(memory: Memory, owner: str, body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the items of the request after an earlier response's, and with the items that it names."""
    hint = f"this server remembers the last {memory.max_responses} responses: send the whole conversation, with store set to false"
    before: Sequence[dict[str, Any]] = ()
    if body.previous_response_id is not None:
        known = memory.conversation(owner, body.previous_response_id)
        if known is None:
            raise ApiError(
                400, f"there is no response {body.previous_response_id!r}; {hint}",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        before = known
    items = [*before, *body.items()]
    for place, item in enumerate(items):
        if item.get("type") == "item_reference":
            found = memory.item(owner, str(item.get("id")))
            if found is None:
                raise ApiError(400, f"there is no item {item.get('id')!r} to refer to; {hint}", param="input")
            items[place] = found
    return items


class Writer(BlockWriter):
    def __init__(self, chat: Chat, body: ResponsesBody, keep: Callable[[str, list[dict[str, Any]]], None]) -> None:
        super().__init__(chat)
        self.body = body
        self.keep = keep
        self.identity = uuid.uuid4().hex
        self.created = int(time.time())
        self._number = -1  # number of the last event

    def response(self) -> dict[str, Any]:
        cut = self.totals.finish == "length"
        status = "incomplete" if cut else "completed"
        output = [self._item(block, status) for block in self.blocks]
        self.keep(f"resp_{self.identity}", output)
        return {
            **self._head(status),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": self._usage(),
            "metrics": {"speculative_decoding": self.totals.speculation()},
        }

    def _head(self, status: str) -> dict[str, Any]:
        """Return the response object without what is generated."""
        body, keywords = self.body, self.chat.job.keywords
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
            "model": self.chat.model,
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

    def begun(self) -> Iterable[bytes]:
        yield self._event("response.created", response=self._head("in_progress"))
        yield self._event("response.in_progress", response=self._head("in_progress"))

    def opened(self, block: Block) -> Iterable[bytes]:
        item = {**self._item(block, "in_progress"), **({} if block.kind == "call" else {"content": []})}
        yield self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=_part(block))

    def grown(self, block: Block, text: str) -> Iterable[bytes]:
        yield self._event(f"{TEXTS[block.kind]}.delta", **self._place(block), delta=text, **_logprobs(block))

    def closed(self, block: Block) -> Iterable[bytes]:
        done = f"{TEXTS[block.kind]}.done"
        if block.kind == "call":
            yield self._event(done, **self._place(block), name=block.name, arguments=block.text)
        else:
            yield self._event(done, **self._place(block), text=block.text, **_logprobs(block))
            yield self._event("response.content_part.done", **self._place(block), part=_part(block))
        status = "incomplete" if self.totals.finish == "length" else "completed"
        yield self._event("response.output_item.done", output_index=block.number, item=self._item(block, status))

    def ended(self) -> Iterable[bytes]:
        whole = self.response()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or str(error.status), message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, name=kind)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._name(block), "output_index": block.number}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _name(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self.identity}_{block.number}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._name(block), "status": status}
        if block.kind == "call":
            return {
                "type": "function_call", **head, "call_id": block.call_id, "name": block.name, "arguments": block.text,
            }  # fmt: skip
        if block.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": [_part(block)]}
        return {"type": "message", **head, "role": "assistant", "content": [_part(block)]}

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self.chat.job, [self.totals], self.reader.reasoning_tokens)
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
