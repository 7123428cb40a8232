"""The names by which a server answers."""

import asyncio
from typing import Any

import pytest

from eyas.serve import hosts
from eyas.serve.auth import LOCAL, HostCheck, allowed_hosts


def status_of(names: tuple[str, ...], host: str | None, path: str = "/") -> int:
    """The status of a request with this Host header."""
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(HostCheck(inner, names)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "", None]
)
def test_this_machine(host: str | None) -> None:
    """Guards probes by HTTP/1.0, HAProxy's default, which have no Host header: a browser always sends one."""
    assert status_of(LOCAL, host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "[::2]", "[", "a b"]
)
def test_a_foreign_name(host: str) -> None:
    """Bug: a page whose name points at this machine reads the answers of its visitor's server."""
    assert status_of(LOCAL, host) == 403
    assert status_of((), host) == 200


def test_who_is_checked() -> None:
    assert allowed_hosts("127.0.0.1", (), has_keys=False) == LOCAL
    assert allowed_hosts("127.0.0.1", (), has_keys=True) == ()
    assert allowed_hosts("0.0.0.0", (), has_keys=False) == ()
    assert hosts.allowed_hosts is allowed_hosts  # by the name of its earlier module
    assert allowed_hosts("127.0.0.1", ("LLM.example.org",), has_keys=True) == ("llm.example.org", *LOCAL)
    assert allowed_hosts("10.0.0.5", ("llm",), has_keys=False) == ("llm", "10.0.0.5")
