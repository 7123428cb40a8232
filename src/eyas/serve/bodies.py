"""Reads the body of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from eyas.serve.errors import ApiError, invalid_body
from eyas.serve.protocol.fields import Body

__all__ = ["body_of"]

Kind = TypeVar("Kind", bound=Body)


def body_of(kind: type[Kind]) -> Callable[[Request], Awaitable[Kind]]:
    """A dependency of FastAPI: the request's body as this model, or an ApiError with status 400.

    Only JSON by name is read: a web page of another origin cannot send that without being asked for
    its permission first.
    """

    async def read(request: Request) -> Kind:
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
        return body

    return read
