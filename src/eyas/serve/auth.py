"""Keys, as `Authorization: Bearer KEY` or Anthropic's `x-api-key: KEY`; and the names by which a server answers.

A web page can point a name of its own at 127.0.0.1 and then read what a local server answers (DNS rebinding). The
browser sends that name as `Host`, so a server for this machine alone refuses other names. A request without a name
is let through: browsers always send one. So is /health, which load balancers ask for by any address.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.errors import ApiError, error_response

# the rest is for probes, and the files of the page
GUARDED = ("/v1", "/infill", "/tokenize", "/detokenize", "/tokenizer_info", "/stats")


class KeyCheck:
    """Lets requests with a right key through, or all if there is none. Each comparison takes the same time."""

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
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key")


def owner_of(headers: Headers) -> str:
    """Return who asks: the digest of the request's key; requests without a key have the same owner."""
    return _digest(given_key(headers) or "").hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _is_guarded(path: str) -> bool:
    return any(path == prefix or path.startswith(prefix + "/") for prefix in GUARDED)


LOCAL = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(listens_at: str, given: Collection[str], has_keys: bool) -> tuple[str, ...]:
    """Return the names that are let through; (): all. With keys no name is refused: a foreign page has none."""
    local = listens_at in LOCAL
    if not given and (has_keys or not local):
        return ()
    return tuple(name.lower() for name in (*given, *(LOCAL if local else (listens_at,))))


class HostCheck:
    """Lets requests to one of these names through, whatever the port."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.names and scope["path"] != "/health":
            host = Headers(scope=scope).get("host", "")
            name = _without_port(host)
            if host and name not in self.names:
                refused = ApiError(
                    403, f"this server does not answer as {name!r}: start it with --allowed-host {name or 'NAME'}"
                )
                await error_response(refused, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _without_port(host: str) -> str:
    """Return the name or address in a `Host` header: `[::1]:8000` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
