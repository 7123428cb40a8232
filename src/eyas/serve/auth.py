"""Keys: a request needs one of the server's keys, as `Authorization: Bearer KEY`, or as `x-api-key: KEY`,
which Anthropic's clients send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.errors import ApiError, error_response

__all__ = ["KeyCheck", "given_key", "owner_of"]

# the rest is for probes, and the files of the page
GUARDED = ("/v1", "/infill", "/tokenize", "/detokenize", "/tokenizer_info", "/stats")


class KeyCheck:
    """Lets requests with a right key through. Keeps digests of the keys only; each comparison takes
    the same time.

    Args:
        keys: none: every request passes.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        self.app = app
        self.digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digests and scope["method"] != "OPTIONS" and _is_guarded(scope["path"]):
            given = given_key(Headers(scope=scope))
            if given is None or not self._is_known(given):
                words = (
                    "this key is not known"
                    if given is not None
                    else "a key is needed: send the header `Authorization: Bearer KEY`"
                )
                refused = ApiError(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
                await error_response(refused, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        digest = _digest(key)
        return any([hmac.compare_digest(digest, known) for known in self.digests])  # a list: every key is compared


def given_key(headers: Headers) -> str | None:
    """Return the key that a request brings; None without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def owner_of(headers: Headers) -> str:
    """Return who asks: the digest of the request's key; requests without a key have the same owner."""
    return _digest(given_key(headers) or "").hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _is_guarded(path: str) -> bool:
    return any(path == prefix or path.startswith(prefix + "/") for prefix in GUARDED)
