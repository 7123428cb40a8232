"""One server of eyas as a replica of Ray Serve.

Ray asks `__serve_build_asgi_app__` for the application when the replica is made: the server's own, whose routes and
checks are the same in a fleet. Two of them concern all replicas, and are passed on: GET /metrics and POST /v1/draft.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from eyas_ray.pages import merged

__all__ = ["FleetApp", "Replica", "Server"]

App = Callable[[Any, Any, Any], Awaitable[None]]
Tell = Callable[..., Awaitable[Sequence[Any]]]  # a method of all replicas and its arguments -> the results
Message = MutableMapping[str, Any]

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
TELL_SECONDS = 60
log = logging.getLogger("eyas.ray")


class Server(Protocol):
    """A server, loaded and ready. Its application starts it, by its lifespan."""

    @property
    def app(self) -> App:
        """Return the ASGI application."""

    def check(self) -> None:
        """Raise an exception if it cannot serve any more."""

    def figures(self) -> dict[str, float]:
        """Return its load and its acceptance."""

    def metrics(self) -> str:
        """Return its metrics in Prometheus' text form."""

    async def change_head(self, source: str) -> None:
        """Let the head of a folder or hub id draft from the next cycle on."""


class Replica:
    """The class of the deployment. Its methods without a comment are hooks of Ray Serve, by name."""

    def __init__(self, make: Callable[[], Server]) -> None:
        """`make` loads the model and makes the server."""
        self.server = make()
        self.head: str | None = None  # put in by `reconfigure`

    async def __serve_build_asgi_app__(self) -> App:
        return FleetApp(self.server.app, self._tell)

    async def check_health(self) -> None:
        """Raise an exception if the replica is to be replaced."""
        self.server.check()

    async def record_routing_stats(self) -> dict[str, float]:
        """Return figures for a router."""
        return self.server.figures()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return figures for a policy that scales."""
        return self.server.figures()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Put another head in, if the new configuration names one: {"draft": FOLDER or hub id}."""
        head = (user_config or {}).get("draft")
        if head is not None and head != self.head:
            await self.change_head(head)

    async def change_head(self, source: str) -> None:
        """Let another head draft, in this replica."""
        await self.server.change_head(source)
        self.head = source

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its metrics."""
        return _own_name(), self.server.metrics()

    async def _tell(self, method: str, *arguments: Any) -> Sequence[Any]:
        from ray import serve

        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        answer = handle.broadcast(method, *arguments)
        return list(await answer.results_async(timeout_s=TELL_SECONDS, return_exceptions=True))


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


class FleetApp:
    """A server's application in a fleet: it answers for all replicas where a request concerns all of them.

    Args:
        app: the server's own.
        tell: calls a method of every replica.
    """

    def __init__(self, app: App, tell: Tell) -> None:
        self.app = app
        self.tell = tell

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        asked = (scope.get("method"), scope.get("path"))
        if asked == ("GET", "/metrics"):
            await self._metrics(scope, receive, send)
        elif asked == ("POST", "/v1/draft"):
            await self._new_head(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _metrics(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Let the server check the request; then the page of all replicas takes the place of its own."""
        messages = await self._answered(scope, receive)
        if messages[0]["status"] == 200:
            results = await self.tell("metrics")
            pages = dict(result for result in results if not isinstance(result, BaseException))
            await _respond(send, merged(pages).encode(), PROMETHEUS)
            return
        for message in messages:
            await send(message)

    async def _new_head(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Let the server check the request and take the head itself; then the other replicas take it."""
        messages = await self._answered(scope, receive)
        if messages[0]["status"] == 200:
            answer = json.loads(b"".join(message.get("body", b"") for message in messages[1:]))
            results = await self.tell("change_head", answer["head"])
            failed = [result for result in results if isinstance(result, BaseException)]
            if failed:
                log.error("%d of %d replicas kept their head: %s", len(failed), len(results), failed[0])
                text = f"{len(failed)} of {len(results)} replicas kept their head: {failed[0]}"
                error = {"message": text.splitlines()[0], "type": "server_error", "param": None, "code": None}
                await _respond(send, json.dumps({"error": error}).encode(), b"application/json", 500)
                return
        for message in messages:
            await send(message)

    async def _answered(self, scope: Mapping[str, Any], receive: Any) -> list[Message]:
        """Return the server's own answer."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, keep)
        return messages


async def _respond(send: Any, content: bytes, media_type: bytes, status: int = 200) -> None:
    headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
