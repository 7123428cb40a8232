"""Requests as they come in: ids and a line in the log for each, never its content; bodies and their largest size."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.errors import ApiError, bad_request, error_response, invalid_body
from eyas.serve.fields import Body

Kind = TypeVar("Kind", bound=Body)
ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
log = logging.getLogger("eyas.serve.access")


def request_id(scope: Scope) -> str:
    """Return the id of the request in this scope: the client's own, where it sends a usable one."""
    given: str = scope["state"]["request_id"]
    return given


class AccessLog:
    """Gives every request an id, returns it as `x-request-id`, and logs method, path, status, time and id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity
        began, status = time.monotonic(), 499  # if nothing is sent, the client has gone

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        try:
            await self.app(scope, receive, marked)
        finally:
            fields = {
                "method": scope["method"],
                # without line breaks that a client chose
                "path": scope.get("raw_path", b"").decode("ascii", "backslashreplace"),
                "status": status,
                "ms": round(1000 * (time.monotonic() - began), 1),
                "request_id": identity,
            }
            log.info("%(method)s %(path)s %(status)d %(ms).1f ms %(request_id)s", fields, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A log of one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record of the log as one JSON object."""
        entry = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        entry.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class BodyLimit:
    """Refuses bodies that are too large: unread where their announced length says so, else at the limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = ApiError(413, f"the body has more than {self.max_bytes} bytes, which is this server's limit")
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self.max_bytes:
            await error_response(refused, scope)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise refused
            return message

        await self.app(scope, counted, send)


def add_route(
    routes: APIRouter, path: str, kind: type[Kind], answer: Callable[[Request, Kind], Awaitable[Response]]
) -> None:
    """Add a route for POST whose body is read as `kind`, with its schema for /openapi.json."""

    async def route(request: Request) -> Response:
        return await answer(request, await read_body(request, kind))

    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    routes.add_api_route(path, route, methods=["POST"], name=path, response_model=None, openapi_extra=described)


async def read_body(request: Request, kind: type[Kind]) -> Kind:
    """Return the request's body as this model. Only JSON by name is read: a foreign page must ask to send it."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "send the body as JSON, with the header `Content-Type: application/json`")
    try:
        content = await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client has gone") from None
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error) from None
    request.state.fields = body.model_fields_set  # for the errors of what comes later
    body.check()
    _check_numbers(content)
    return body


def _check_numbers(content: bytes) -> None:
    """Refuse NaN and Infinity: JSON has neither, and values that are sent back, such as `metadata`, would not
    be JSON."""
    if b"NaN" not in content and b"Infinity" not in content:
        return
    for name, value in json.loads(content).items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise bad_request(f"{name} holds NaN or Infinity, which JSON does not have", name) from None
