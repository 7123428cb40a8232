"""Limits of bodies, answers and token ids."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.errors import ApiError, error_response
from eyas.serve.records import Settings

__all__ = ["BodyLimit", "answer_tokens", "check_count", "check_ids"]


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


def check_count(settings: Settings, prompts: int, n: int) -> None:
    """Raise ApiError if a request asks for more sequences than the server takes at once."""
    if prompts * n > settings.max_sequences:
        raise ApiError(
            400,
            f"{prompts} prompts x {n} samples are more than {settings.max_sequences}: ask for fewer at once",
            param="n",
        )


def check_ids(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for token ids outside the vocabulary; `param` is the field that they come from."""
    outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        message = f"token id {outside} is outside the vocabulary of {vocab_size} (0..{vocab_size - 1})"
        raise ApiError(400, message, param=param)


def answer_tokens(settings: Settings, prompt: int, asked: int | None, default: int) -> int:
    """Return the tokens that an answer may have: at most the server's limit and the room after the prompt. Clients
    know neither, so their answer is cut there. A prompt without room is refused in words by which clients know it."""
    context = settings.max_model_len
    if prompt >= context:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {prompt} tokens "
            f"(prompt is too long: {prompt} tokens > {context - 1} maximum). Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
    return min(default if asked is None else asked, settings.max_tokens, context - prompt)
