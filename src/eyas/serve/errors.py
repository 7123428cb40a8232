"""Errors as clients expect them: a status, and OpenAI's {"error": {"message", "type", "param", "code"}}. On the
paths of Anthropic's dialect and for its clients it is {"type": "error", "error": {"type", "message"}}.

400   a value, field or prompt that cannot be used       413   a body that is too large
401   a wrong key                                        429   the queue is full: Retry-After says when to come back
403   what only the admin may ask for
404   a model or path that is not here                   503   the server ends or has failed
408   the deadline of the request has passed             500   a fault of ours
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from eyas.errors import EyasError, FitError, InputError, OptionError

JsonObject = dict[str, Any]

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC_PATH, ANTHROPIC_HEADER = "/v1/messages", "anthropic-version"

FIELD = re.compile(r"[a-z]\w*")
IN_OUR_WORDS = {
    r"^Value error, ": "",
    r"^Field required": "is missing",
    r"^(Input|List|Dictionary|String|Value) should": "must",
    r"^Object does not match.*": "must be an object",
    r" after validation": "",
    r"a valid dictionary( or .*)?": "an object",
    r"a valid array": "a list",
    r"a valid integer": "a whole number",
    r"a valid boolean": "true or false",
    r"a valid ": "a ",
}
TYPE_NAMES = ("bool", "float", "int", "str")  # by which pydantic names the choices of a union
MEANT_BY = {
    **dict.fromkeys(("message", "messages", "prompt", "template"), ("messages",)),
    "variable": ("chat_template_kwargs",),
    "schema": ("response_format", "structured_outputs", "guided_json", "text"),
    "expression": ("regex", "structured_outputs", "guided_regex"),
    "constraint": ("response_format", "regex", "grammar", "choice", "structured_outputs", "tool_choice", "text"),
    "grammar": ("grammar", "structured_outputs", "guided_grammar", "tools"),
    "choice": ("choice", "structured_outputs", "guided_choice"),
}
PROMPTS = ("messages", "prompt", "input")  # the field that holds the prompt, by dialect


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
        super().__init__(status, message)  # what pickle calls the class with again
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return self.message

    def body(self, anthropic: bool = False) -> JsonObject:
        """Return the error as a JSON object, in OpenAI's form or, with `anthropic`, in Anthropic's."""
        types, fault = (ANTHROPIC_TYPES, "api_error") if anthropic else (TYPES, "server_error")
        kind = types.get(self.status, fault if self.status >= 500 else "invalid_request_error")
        if anthropic:
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the answer to a request that cannot be served; `param` is the field that is wrong."""
    return ApiError(400, message, param=param, code=code)


def error_of(error: BaseException, fields: Collection[str] = ()) -> ApiError:
    """Return the answer for an exception; it names the one of the body's `fields` that the error is about."""
    prompt = next((name for name in PROMPTS if name in fields), "messages")
    if isinstance(error, ApiError):
        error.param = prompt if error.param == "messages" else error.param
        return error
    if isinstance(error, FitError):
        return bad_request(str(error), prompt, code="context_length_exceeded")
    if isinstance(error, InputError | OptionError):
        named, message = _named_field(str(error), fields, prompt), str(error)
        if named == "tools":  # the client has sent no grammar
            message = re.sub(r"^(the )?grammar\b", "the grammar of the tools", message)
        return bad_request(message, named)
    if isinstance(error, EyasError):
        return ApiError(500, str(error))
    return ApiError(500, "an internal error; the server's log has the details")


def _named_field(message: str, fields: Collection[str], prompt: str) -> str | None:
    """Return the field that a message begins with or names, or means by another word."""
    words = FIELD.findall(message)
    named = [word for place, word in enumerate(words) if word in fields and (place == 0 or "_" in word)]
    meant = [prompt if name == "messages" else name for word in words for name in MEANT_BY.get(word, ())]
    return next((name for name in (*named, *meant) if name in fields), None)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the error as a response to the request of this scope, in its dialect."""
    anthropic = f"{scope['path']}/".startswith(f"{ANTHROPIC_PATH}/") or ANTHROPIC_HEADER in Headers(scope=scope)
    # escapes, so that half of a surrogate pair can be sent back
    content = json.dumps(error.body(anthropic)).encode("ascii")
    return Response(content, error.status, headers=error.headers, media_type="application/json")


def invalid_body(error: ValidationError) -> ApiError:
    """Return the answer for a body that pydantic refuses: its first complaint, with all types that are allowed."""
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    if complaints[0]["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {complaints[0]['msg'].removeprefix('Invalid JSON: ')}")
    place = _place(complaints[0]["loc"])
    first, *others = dict.fromkeys(_in_our_words(one["msg"]) for one in complaints if _place(one["loc"]) == place)
    message = " or ".join([first, *(text.removeprefix("must be ") for text in others)])
    item = next((f"item {part + 1} " for part in complaints[0]["loc"] if isinstance(part, int)), "")
    return bad_request(f"{place or 'the body'}{': ' if item else ' '}{item}{message}", place or None)


def _place(location: tuple[int | str, ...]) -> str:
    """Return the field that a complaint of pydantic is about, up to a list or a choice of types."""
    names = takewhile(lambda part: isinstance(part, str) and FIELD.fullmatch(part) and part not in TYPE_NAMES, location)
    return ".".join(map(str, names))


def _in_our_words(message: str) -> str:
    for theirs, ours in IN_OUR_WORDS.items():
        message = re.sub(theirs, ours, message)
    return message


def install(app: FastAPI) -> None:
    """Give an app the answers to errors: OpenAI's form, or Anthropic's for its clients."""

    @app.exception_handler(ApiError)
    @app.exception_handler(EyasError)
    async def refused(request: Request, error: ApiError | EyasError) -> Response:
        return error_response(error_of(error, getattr(request.state, "fields", ())), request.scope)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = _not_here(app, request)
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        return error_response(ApiError(error.status_code, message, headers=error.headers), request.scope)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(error_of(error), request.scope)


def _not_here(app: FastAPI, request: Request) -> str:
    """Return the message for a path that is not served: the part that a client's base URL lacks, or has too much."""
    path = request.url.path
    scope = {**request.scope, "path": f"/v1{path}"}
    if any(route.matches(scope)[0] is not Match.NONE for route in app.routes):
        return f"there is no {path} here: this client's base URL must end in /v1 (it asks for /v1{path} then)"
    if path.startswith("/v1/v1/"):
        return f"there is no {path} here: this client adds /v1 itself, so leave it out of its base URL"
    if path.startswith("/api/"):
        return f"there is no {path} here, this is not Ollama: connect as to OpenAI, with a base URL that ends in /v1"
    return f"there is no {path} here"
