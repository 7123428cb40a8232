"""Server-sent events, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from eyas.serve.errors import ApiError, error_of

__all__ = ["DONE", "KEEP_ALIVE", "EventStream", "event", "json_response", "unless_gone"]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies are to hand every event on at once
log = logging.getLogger(__name__)


def written(data: Any) -> bytes:
    """Return data as JSON. Half a surrogate pair becomes a question mark, for it has no bytes."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(data: Any, headers: Mapping[str, str]) -> Response:
    """Return a whole answer. It may hold what the client sent, so it must not fail at any value."""
    return Response(written(data), headers=dict(headers), media_type="application/json")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one event as it is sent."""
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + written(data) + b"\n\n"


class EventStream(Response):
    """A response of events. It ends early when the client hangs up. An error in the middle becomes an event
    (`failed`).
    `close` is called when it ends, however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        last: bytes = DONE,
        headers: Mapping[str, str] | None = None,
        failed: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self.events = events
        self.close = close
        self.last = last
        self.failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first_of(self._send_all(send), _hung_up(receive))
        finally:
            self.close()

    async def _send_all(self, send: Send) -> None:
        async def body(content: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for content in self.events:
                await body(content)
        except Exception as error:
            answer = error_of(error)
            if answer is not error and answer.status == 500:
                log.exception("a stream has failed")
            await body(self.failed(answer))
        await body(self.last, more=False)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is given up when the client hangs up."""
    result = await _first_of(work, _hung_up(request.receive))
    if result is None:
        raise ApiError(499, "the client has gone")
    return result


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Coroutine[Any, Any, T], other: Coroutine[Any, Any, None]) -> T | None:
    """Return the result of `work`; None when `other` is done before it."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    return tasks[0].result() if not tasks[0].cancelled() else None
