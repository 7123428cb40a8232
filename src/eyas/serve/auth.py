"""Keys, as `Authorization: Bearer KEY` or Anthropic's `x-api-key: KEY`; and the names by which a server answers.

A web page can point a name of its own at 127.0.0.1 and then read a local server's answers (DNS rebinding). The
browser sends that name as `Host`, so a server for this machine alone refuses other names. A request without a
name is let through: browsers always send one. So is /health, which load balancers ask for by any address.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.errors import ApiError, error_response

# the rest is for probes, and the files of the page
GUARDED = ("/v1", "/infill", "/tokenize", "/detokenize", "/tokenizer_info", "/stats")


class Guard(ABC):
    """Lets requests through that it does not refuse."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self.refusal(scope["path"], Headers(scope=scope), scope) if scope["type"] == "http" else None
        if refused is not None:
            await error_response(refused, scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    @abstractmethod
    def refusal(self, path: str, headers: Headers, scope: Scope) -> ApiError | None:
        """Return the answer to a request that is not let through."""


class KeyCheck(Guard):
    """Lets requests with a right key through, or all if there is none. Each comparison takes the same time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] = ()) -> None:
        super().__init__(app)
        self.digests = [_digest(key) for key in keys]

    def refusal(self, path: str, headers: Headers, scope: Scope) -> ApiError | None:
        guarded = any(path == prefix or path.startswith(prefix + "/") for prefix in GUARDED)
        if not self.digests or not guarded or scope["method"] == "OPTIONS":
            return None
        message = "a key is needed: send the header `Authorization: Bearer KEY`"
        if (given := given_key(headers)) is not None:
            digest = _digest(given)
            if any([hmac.compare_digest(digest, known) for known in self.digests]):  # a list: every key is compared
                return None
            message = "this key is not known"
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def given_key(headers: Headers) -> str | None:
    """Return the key that a client sent, as a bearer token or as `x-api-key`; None without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def owner_of(headers: Headers) -> str:
    """Return who asks: the digest of the request's key; requests without a key have the same owner."""
    return _digest(given_key(headers) or "").hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


LOCAL = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(listens_at: str, given: Collection[str], has_keys: bool) -> tuple[str, ...]:
    """Return the names that are let through; (): all. With keys no name is refused: a foreign page has none."""
    local = listens_at in LOCAL
    if not given and (has_keys or not local):
        return ()
    return tuple(name.lower() for name in (*given, *(LOCAL if local else (listens_at,))))


class HostCheck(Guard):
    """Lets requests to one of these names through, at any port."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        super().__init__(app)
        self.names = names

    def refusal(self, path: str, headers: Headers, scope: Scope) -> ApiError | None:
        host = headers.get("host", "")
        # of `[::1]:8000` it is `::1`
        name = (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].lower()
        if not self.names or path == "/health" or not host or name in self.names:
            return None
        return ApiError(403, f"this server does not answer as {name!r}: start it with --allowed-host {name or 'NAME'}")
