"""The clients of runs/serve_load.py, in a process of their own: an order as JSON on stdin, what
came back as JSON on stdout.

Answers are recorded as they come, bytes with times, and read when everything is over: on a small
machine a client that parses while it measures would be measured itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

MOST_OPEN = 128  # requests of an open loop at once; one that comes beyond them is counted and not sent
Order = dict[str, Any]


@dataclass
class Exchange:
    """One request, and its answer in the pieces in which it came."""

    kind: str
    prompt: int
    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    whole: bool = False

    async def run(self, url: str, body: dict[str, Any]) -> None:
        """Send the request, and record until the server closes the connection."""
        place, content = urlsplit(url), json.dumps(body).encode()
        head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            while piece := await reader.read(65536):
                self.pieces.append((time.perf_counter(), piece))
            self.whole = True
        finally:
            writer.close()

    def record(self, start: float) -> dict[str, Any]:
        """The answer as JSON: its status, its text, and the time at which each part came."""
        connection, status, text = h11.Connection(h11.CLIENT), 0, ""
        connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
        connection.send(h11.EndOfMessage())
        events: list[tuple[float, int]] = []  # (seconds since the start, characters)
        rest = b""
        for at, piece in self.pieces:
            connection.receive_data(piece)
            came = ""
            while isinstance(event := connection.next_event(), h11.Response | h11.Data):
                if isinstance(event, h11.Response):
                    status = event.status_code
                    continue
                *lines, rest = (rest + bytes(event.data)).split(b"\n\n")
                came += "".join(map(text_of, lines))
            if came:
                events.append((round(at - start, 6), len(came)))
                text += came
        times = {
            "began": round(self.began - start, 6),
            "events": events,
            "end": round(self.pieces[-1][0] - start, 6) if self.pieces else None,
        }
        return {"kind": self.kind, "prompt": self.prompt, "status": status, "whole": self.whole, "text": text, **times}


def text_of(event: bytes) -> str:
    """The text in one server-sent event of a chat or a completion."""
    data = event.partition(b"data:")[2].strip()
    if not data.startswith(b"{"):
        return ""
    text = ""
    for choice in json.loads(data).get("choices") or []:
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text


class Load:
    """Requests for some seconds; what is not done then is given up."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.exchanges: list[Exchange] = []
        self.unsent = 0
        self.start = time.perf_counter()

    def left(self) -> float:
        return self.start + float(self.order["seconds"]) - time.perf_counter()

    async def ask(self, kind: str, number: int) -> None:
        """One request."""
        prompts = self.order[kind]
        exchange = Exchange(kind, number % len(prompts), time.perf_counter())
        self.exchanges.append(exchange)
        with contextlib.suppress(ConnectionError):
            await exchange.run(self.order["url"], prompts[number % len(prompts)])

    async def closed(self) -> None:
        """Every client sends its next request when it has the answer to the one before."""
        numbers = itertools.count()

        async def client() -> None:
            while True:
                await self.ask("bodies", next(numbers))

        await asyncio.gather(*(client() for _ in range(self.order["clients"])))

    async def open(self) -> None:
        """Requests come at random (Poisson), whatever the server does."""
        chance, numbers = random.Random(self.order["seed"]), itertools.count()
        running: set[asyncio.Task[None]] = set()
        at = self.start
        while True:
            at += chance.expovariate(self.order["rate"])
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            if len(running) >= MOST_OPEN:
                self.unsent += 1
                continue
            task = asyncio.create_task(self.ask("bodies", next(numbers)))
            running.add(task)
            task.add_done_callback(running.discard)

    async def intruders(self) -> None:
        """Long prompts, one after the other, each after a pause."""
        for number in range(len(self.order["long"])):
            await asyncio.sleep(self.order["pause"])
            await self.ask("long", number)

    async def run(self) -> dict[str, Any]:
        """The whole order."""
        jobs = [self.closed() if "clients" in self.order else self.open()]
        if self.order.get("long"):
            jobs.append(self.intruders())
        tasks = [asyncio.create_task(job) for job in jobs]
        await asyncio.sleep(self.left())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        return {"unsent": self.unsent, "exchanges": [one.record(self.start) for one in self.exchanges]}


if __name__ == "__main__":
    json.dump(asyncio.run(Load(json.load(sys.stdin)).run()), sys.stdout)
