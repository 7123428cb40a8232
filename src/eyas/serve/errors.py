"""Errors as OpenAI's clients expect them: a status, and {"error": {"message", "type", "param", "code"}}.

400   a value, field or prompt that cannot be used       413   a body that is too large
401   a wrong key                                        429   the queue is full: Retry-After says when to come back
404   a model or path that is not here                   503   the server ends or has failed
408   the deadline of the request has passed             500   a fault of ours
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from eyas.errors import EyasError, FitError, InputError, OptionError

__all__ = ["ApiError", "error_of", "error_response", "install", "invalid_body"]

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error. The message is one line for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that clients read."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def error_of(error: BaseException) -> ApiError:
    """The answer for an exception: a mistake in the request has status 400, everything else 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FitError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, InputError | OptionError):
        return ApiError(400, str(error))
    if isinstance(error, EyasError):
        return ApiError(500, str(error))
    return ApiError(500, "an internal error; the server's log has the details")


def error_response(error: ApiError) -> Response:
    """The error as a response."""
    content = json.dumps(error.body()).encode("ascii")  # escapes, so that half of a surrogate pair can be sent back
    return Response(content, error.status, headers=error.headers, media_type="application/json")


def invalid_body(error: ValidationError) -> ApiError:
    """The answer for a body that pydantic refuses: the first of its complaints, with the field's name."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    return ApiError(400, f"{place}: {message}" if place else message, param=place or None)


def install(app: FastAPI) -> None:
    """Let the app answer every exception in this form."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(EyasError)
    async def mistaken(request: Request, error: EyasError) -> Response:
        return error_response(error_of(error))

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(error_of(error))
