"""Before Ray's HTTP proxy, in its process.

Ray itself retries a request until a replica accepts it. This module handles failures after that:

    a replica dies before the answer begins     the request is repeated: no byte of an answer has reached the client
    a replica dies in the middle of a stream    the stream ends with an error event, so that nobody believes it is complete
    a request names no session                  it gets the name of one, by which Ray finds the replica with its prefix

Ray's proxy calls `middlewares` where the variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. The class is
plain ASGI and knows nothing of Ray: an application that returns without a response has lost its replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from eyas_ray.sessions import previous_response, session_of

__all__ = ["CALLBACK", "SESSION_HEADER", "Gate", "middlewares"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

CALLBACK = "eyas_ray.gate:middlewares"  # for RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
SESSION_HEADER, REQUEST_ID = b"x-session-id", b"x-request-id"
TRIES_HEADER = b"x-eyas-tries"  # in an answer whose request was repeated
WAITS = (0.0, 0.1, 0.5, 2.0, 5.0)  # seconds before each try
KEPT_BYTES = 64 * 2**20  # a larger body is not kept, and its request not repeated
REMEMBERED = 65_536  # responses whose session is known
RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[\w-]+)"')
LOST = "the replica that answered has died; what came before this is not the whole answer"
NONE_LEFT = "no replica answers: those that took this request have died"
log = logging.getLogger("eyas.ray")


def middlewares() -> list[Any]:
    """Return the wrapper of Ray's proxy."""
    from starlette.middleware import Middleware

    return [Middleware(Gate)]


class Gate:
    """An ASGI application around Ray's proxy."""

    def __init__(self, app: App, waits: Sequence[float] = WAITS) -> None:
        self.app = app
        self.waits = waits
        self._sessions: OrderedDict[str, bytes] = OrderedDict()  # id of a response -> session

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = Body(receive)
        await body.read()
        session = self._session(scope, body)
        headers = [*scope["headers"], *([(SESSION_HEADER, session)] if session else [])]
        answer = Answer(send, scope["path"])
        for attempt, wait in enumerate(self.waits):
            await asyncio.sleep(wait)
            answer.tries = attempt + 1
            await self.app({**scope, "headers": list(headers)}, body.replay(), answer.send)
            if answer.ended or body.client_left:
                break
            log.warning("%s has lost its replica (try %d, begun: %s)", scope["path"], attempt + 1, answer.begun)
            if answer.begun or not body.whole:
                break
        if session and answer.response_id:
            self._remember(answer.response_id, session)
        if not answer.ended and not body.client_left:
            await answer.fail()

    def _session(self, scope: Mapping[str, Any], body: Body) -> bytes | None:
        """Return the name of the request's session; None if it has none, or brings its own."""
        if scope["method"] != "POST" or any(name == SESSION_HEADER for name, _ in scope["headers"]):
            return None
        content = body.content
        if scope["path"].endswith("/responses") and (previous := previous_response(content)):
            return self._sessions.get(previous)
        name = session_of(content)
        return None if name is None else name.encode()

    def _remember(self, response: str, session: bytes) -> None:
        self._sessions[response] = session
        if len(self._sessions) > REMEMBERED:
            self._sessions.popitem(last=False)


class Body:
    """The body of a request, kept so that it can be sent again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.whole = False  # whether all of it is kept
        self.client_left = False

    async def read(self) -> None:
        """Read the body, unless it is too large to be kept."""
        size = 0
        while size <= KEPT_BYTES:
            message = await self._next()
            self._messages.append(message)
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.whole = not self.client_left
                return

    @property
    def content(self) -> bytes:
        """The part of the body that is kept."""
        return b"".join(message.get("body", b"") for message in self._messages)

    def replay(self) -> Receive:
        """Return a `receive` that begins with the kept part."""
        kept = iter(self._messages)

        async def receive() -> Message:
            message = next(kept, None)
            return dict(message) if message is not None else await self._next()

        return receive

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
        return message


class Answer:
    """The response to a request, of which the client sees one beginning and one end, however often it is tried."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._start: Message | None = None  # held back until something follows it
        self._started = False  # whether the client has the start
        self.begun = False  # whether the client has more than comments
        self.tries = 1
        self.ended = False
        self._type = b""
        self.response_id: str | None = None

    async def send(self, message: Message) -> None:
        """Pass a message of the application on."""
        if message["type"] == "http.response.start":
            tries = [(TRIES_HEADER, b"%d" % self.tries)] if self.tries > 1 else []
            self._start = {**message, "headers": [*_one_id(message["headers"]), *tries]}
            self._type = dict(message["headers"]).get(b"content-type", b"")
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body = message.get("body", b"")
        if self._start is not None:
            await self._begin(body)
        self.begun = self.begun or not (self.is_stream and (not body or body.startswith(b":")))
        self.ended = not message.get("more_body", False)
        await self._send(message)

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self._type.startswith(b"text/event-stream")

    async def fail(self) -> None:
        """End an answer that has lost its replica."""
        if not self._started:
            await self._refuse()
        elif self.is_stream:
            await self._send({"type": "http.response.body", "body": self._error_event(), "more_body": False})
        # else: the server closes the connection of a response that has no end

    async def _begin(self, body: bytes) -> None:
        """Send the start, once: an earlier try may have sent one before its comments."""
        start, self._start = self._start, None
        if not self._started and start is not None:
            await self._send(start)
        self._started = True
        if self._path.endswith("/responses") and (found := RESPONSE_ID.search(body[:4096])):
            self.response_id = found[1].decode()

    async def _refuse(self) -> None:
        content = json.dumps(self._error(NONE_LEFT)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"retry-after", b"1"),
        ]
        await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})

    def _error_event(self) -> bytes:
        """Return the event of an error, in the dialect of the path."""
        error = self._error(LOST)
        if self._path.endswith("/responses"):
            error = {"type": "error", "code": "replica_lost", "message": LOST, "param": None}
        name = b"event: error\n" if "type" in error else b""
        return name + b"data: " + json.dumps(error).encode() + b"\n\n"

    def _error(self, message: str) -> dict[str, Any]:
        if "/messages/" in f"{self._path}/":
            return {"type": "error", "error": {"type": "api_error", "message": message}}
        return {"error": {"message": message, "type": "server_error", "param": None, "code": "replica_lost"}}


def _one_id(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers with the first request id alone: the replica's own. Ray's proxy adds another one."""
    first = next((header for header in headers if header[0] == REQUEST_ID), None)
    return [header for header in headers if header[0] != REQUEST_ID or header is first]
