"""Routes that read a body."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from eyas.serve.errors import ApiError, invalid_body
from eyas.serve.protocol.fields import Body

__all__ = ["add_route"]

Kind = TypeVar("Kind", bound=Body)


def add_route(
    routes: APIRouter, path: str, kind: type[Kind], answer: Callable[[Request, Kind], Awaitable[Response]]
) -> None:
    async def route(request: Request) -> Response:
        return await answer(request, await read_body(request, kind))

    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    routes.add_api_route(path, route, methods=["POST"], name=path, response_model=None, openapi_extra=described)


async def read_body(request: Request, kind: type[Kind]) -> Kind:
    """Return the request's body as this model. Only JSON by name is read: a page of another origin must ask to send
    it."""
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
    """Refuse NaN and Infinity: JSON has neither, and what is sent back, such as `metadata`, would not be JSON."""
    if b"NaN" not in content and b"Infinity" not in content:
        return
    for name, value in json.loads(content).items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ApiError(400, f"{name} holds NaN or Infinity, which JSON does not have", param=name) from None
