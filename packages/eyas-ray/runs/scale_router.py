"""Which replica answers the next turn of a conversation? Three ways to choose, in the same load.

    python packages/eyas-ray/runs/scale_router.py --output docs/results/scale_router.json

    two choices   Ray's default: the less busy of two replicas
    sessions      eyas' fleets: `ConsistentHashRouter`, by the name that `eyas_ray.gate` gives a conversation
    prefixes      `PrefixCacheAffinityRouter` of `ray.serve.llm`: the replica that was given the longest part of the
                  prompt before. It reads the arguments of a call, so a thin ingress in front of the replicas reads the
                  body of the request

Two replicas of the embedded model on this machine. Clients hold one conversation after another, each with its own first
message of some hundred words and several turns, streamed; then as many that begin with a system message which all of
them share. Figures: the time until the first text of a turn after the first one, the share of the prompt's tokens that
were not read again, and answers a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import httpx2
import ray

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import machine, parser, rotated, run, write
from ray import serve
from rich.progress import track
from starlette.requests import Request
from starlette.responses import StreamingResponse

from eyas_ray.fleet import VARIABLES
from eyas_ray.llm_server import asked
from eyas_ray.serving import Maker, arguments_of, build_app

PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
CHAT = "/v1/chat/completions"
TALE = "the boat went over a lake and its captain told of an island where old trees had bells in them"
WORDS = TALE.split()
ROUTERS = ("two choices", "sessions", "prefixes")


class Engine:
    """A replica whose calls are chats, with the server that `build_app` would serve."""

    async def __init__(self, make: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        self.server = await asyncio.to_thread(make)
        self._running = self.server.app.router.lifespan_context(self.server.app)
        await self._running.__aenter__()

    async def chat(self, request: SimpleNamespace) -> AsyncIterator[bytes]:
        """Yield the parts of the answer."""
        async for message in asked(self.server.app, CHAT, request.body, {}):
            yield message.get("body", b"")


class Ingress:
    """Reads the body of a request, so that the router sees the messages."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.json()
        parts = self.engines.chat.remote(SimpleNamespace(messages=body["messages"], body=body))
        return StreamingResponse(parts, media_type="text/event-stream")


def application(router: str, options: Mapping[str, Any]) -> Any:
    """Return the application with this router."""
    if router != "prefixes":
        return build_app({**options, "sticky": router == "sessions"})
    deployment = serve.deployment(
        Engine,
        name="engine",
        num_replicas=options["replicas"],
        max_ongoing_requests=2 * options["rows"],
        ray_actor_options={"num_cpus": 1},
        request_router_config={"request_router_class": PREFIX_ROUTER},
    )
    make = Maker(arguments_of({name: value for name, value in options.items() if name != "replicas"}))
    ingress = serve.deployment(Ingress, name="ingress", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    return ingress.bind(deployment.bind(make))


@contextmanager
def served(router: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Serve with this router, and give the URL."""
    os.environ.update(VARIABLES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=options["replicas"], include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(router, options))
        yield f"http://127.0.0.1:{port}{CHAT}"
        serve.shutdown()
    finally:
        ray.shutdown()


@dataclass
class Turn:
    """The seconds, the tokens and the text of one turn of a conversation."""

    number: int
    first_seconds: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass
class Load:
    """The clients and what they ask for."""

    clients: int
    conversations: int
    turns: int
    words: int
    tokens: int
    shared: bool
    done: list[Turn] = field(default_factory=list)

    def text(self, name: str) -> str:
        """Return text of some length, another one for each name."""
        chosen = random.Random(name)
        return " ".join(chosen.choice(WORDS) for _ in range(self.words))

    async def all_clients(self, url: str) -> None:
        """Hold all conversations."""
        await asyncio.gather(*(self.client(url, number) for number in range(self.clients)))

    async def client(self, url: str, number: int) -> None:
        """Hold one conversation after the other."""
        async with httpx2.AsyncClient(timeout=600) as http:
            for conversation in range(self.conversations):
                messages = [{"role": "user", "content": self.text(f"{number} {conversation}")}]
                if self.shared:
                    messages.insert(0, {"role": "system", "content": self.text("all")})
                for turn in range(self.turns):
                    self.done.append(answer := await self.ask(http, url, messages, turn))
                    messages.append({"role": "assistant", "content": answer.text})
                    messages.append({"role": "user", "content": f"And what happened then, in part {turn + 2}?"})

    async def ask(self, http: Any, url: str, messages: list[dict[str, str]], turn: int) -> Turn:
        """Ask for one answer as a stream."""
        options = {"stream_options": {"include_usage": True}, "max_tokens": self.tokens, "ignore_eos": True}
        body = {"messages": messages, "stream": True, "temperature": 0, **options}
        began, first, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
        async with http.stream("POST", url, json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                    first = first or (time.monotonic() if text else 0.0)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Turn(turn, first - began, usage["prompt_tokens"], cached, text)


def measured(router: str, options: Any) -> Iterator[dict[str, Any]]:
    """Yield the lines of a router."""
    with served(router, {"replicas": 2, "rows": options.rows, "tree": "fixed"}) as url:
        for shared in (False, True):
            load = Load(options.clients, options.conversations, options.turns, options.words, options.tokens, shared)
            began = time.monotonic()
            asyncio.run(load.all_clients(url))
            yield {"router": router, **figures(load, time.monotonic() - began)}


def figures(load: Load, seconds: float) -> dict[str, Any]:
    """Return the figures of a load that took so long."""
    later = [turn for turn in load.done if turn.number]
    return {
        "beginnings": "shared" if load.shared else "of their own",
        "conversations": load.clients * load.conversations,
        "first_seconds_median": round(median(turn.first_seconds for turn in later), 3),
        "first_seconds_mean": round(mean(turn.first_seconds for turn in later), 3),
        "cached_share": round(sum(t.cached_tokens for t in load.done) / sum(t.prompt_tokens for t in load.done), 3),
        "answers_per_second": round(len(load.done) / seconds, 3),
    }


def main() -> None:
    note = ("", "a remark for the record")
    made = parser(__doc__, clients=8, conversations=2, turns=3, words=150, tokens=24, rows=4, rounds=2, note=note)
    options, before, lines = made.parse_args(), machine(), list[dict[str, Any]]()
    jobs = [router for n in range(options.rounds) for router in rotated(ROUTERS, n)]
    for router in track(jobs, transient=True):
        for line in measured(router, options):
            lines.append(line)
            print(line, flush=True)
            write(options.output, {"note": options.note, "lines": lines}, before, quiet=True)


if __name__ == "__main__":
    run(main)
