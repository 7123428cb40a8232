"""POST /v1/responses: OpenAI's newer dialect, without its memory. Every request brings its whole
conversation.

Its stream is a sequence of typed events:

    response.created  response.in_progress
        response.output_item.added
            response.content_part.added
                response.output_text.delta ...  response.output_text.done
            response.content_part.done
        response.output_item.done
    response.completed, or response.incomplete where the text was cut at its length
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from eyas.serve.access import request_id
from eyas.serve.answers import Answer, Silence
from eyas.serve.errors import ApiError
from eyas.serve.limits import answer_tokens
from eyas.serve.protocol.responses import ResponsesBody
from eyas.serve.records import Job, Totals
from eyas.serve.reply import usage_of, whole
from eyas.serve.service import Service
from eyas.serve.stream import KEEP_ALIVE, EventStream, event

__all__ = ["respond"]


async def respond(service: Service, request: Request, body: ResponsesBody) -> Response:
    """Answer one request."""
    model = service.model_name(body.model)
    if body.n not in (None, 1):
        raise ApiError(400, "a response has one text: leave n out", param="n")
    prompt = await service.in_worker(service.render, body.messages())
    asked = body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens
    keywords = body.keywords(
        response_format=body.response_form(),
        max_new_tokens=answer_tokens(service.settings, len(prompt.ids), asked, service.settings.max_tokens),
    )
    keywords |= service.adapter_keywords(model)
    job = Job((prompt.ids,), keywords, media=prompt.media or None, **body.job_fields())
    answer = await service.submit(job)
    writer = Writer(body, job, model, request_id(request.scope))
    if body.stream:
        events = writer.events(answer, service.settings.keep_alive)
        return EventStream(events, answer.close, b"", body.response_headers, writer.failed)
    (totals,) = await whole(request, answer)
    return JSONResponse(writer.response(totals), headers=body.response_headers)


class Writer:
    """Writes one response, as a whole or as events."""

    def __init__(self, body: ResponsesBody, job: Job, model: str, identity: str) -> None:
        self.body = body
        self.job = job
        self.model = model
        self.identity = identity
        self.created = int(time.time())
        self._number = -1  # number of the last event

    def response(self, totals: Totals | None = None) -> dict[str, Any]:
        """The response object; without Totals, that of one which has just begun."""
        cut = totals is not None and totals.finish == "length"
        status = "in_progress" if totals is None else "incomplete" if cut else "completed"
        body = self.body
        return {
            "id": f"resp_{self.identity}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": [] if totals is None else [self._message(status, totals.text)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self.job.keywords["temperature"],
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if totals is None else self._usage(totals),
            "metadata": (body.model_extra or {}).get("metadata") or {},
            **({} if totals is None else {"metrics": {"speculative_decoding": totals.speculation()}}),
        }

    async def events(self, answer: Answer, keep_alive: float) -> AsyncIterator[bytes]:
        """The response as events."""
        totals, place = Totals(), {"item_id": f"msg_{self.identity}", "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())
        yield self._event(
            "response.output_item.added", output_index=0, item={**self._message("in_progress", ""), "content": []}
        )
        yield self._event("response.content_part.added", **place, part=_part(""))
        async for delta in answer.deltas(keep_alive):
            if isinstance(delta, Silence):
                yield KEEP_ALIVE
                continue
            totals.add(delta)
            if delta.text:
                yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        whole = self.response(totals)
        yield self._event("response.output_text.done", **place, text=totals.text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(totals.text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        """The event of an error in the middle of the stream."""
        return self._event("error", code=error.code or str(error.status), message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, name=kind)

    def _message(self, status: str, text: str) -> dict[str, Any]:
        head = {"type": "message", "id": f"msg_{self.identity}", "status": status, "role": "assistant"}
        return {**head, "content": [_part(text)]}

    def _usage(self, totals: Totals) -> dict[str, Any]:
        usage = usage_of(self.job, [totals])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": totals.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
