"""The names by which a server answers.

A web page can point a name of its own at 127.0.0.1 and then, in its visitor's browser, read what a
local server answers (DNS rebinding). The browser sends that name as `Host`, so a server for this
machine alone refuses names that are not this machine's. A request without a name is let through, for a browser always
sends one and probes by HTTP/1.0 do not. So is /health, which load balancers ask for by any address.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.errors import ApiError, error_response

__all__ = ["LOCAL", "HostCheck", "allowed_hosts"]

LOCAL = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(listens_at: str, given: Collection[str], has_keys: bool) -> tuple[str, ...]:
    """Return the names that are let through; (): all.

    Args:
        listens_at: the server's address.
        given: names by option.
        has_keys: requests need a key. A foreign page has none, so no name is refused.
    """
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
