"""The clients of runs/serve_load.py in a process of their own: an order as JSON on stdin, answers as JSON on stdout.

Answers are recorded as they come, bytes with times, and read when everything is over: on a small machine a client that
parses while it measures would be measured itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11


@dataclass
class Exchange:
    """One request, and its answer in the pieces in which it came."""

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
        end = round(self.pieces[-1][0] - start, 6) if self.pieces else None
        times = {"began": round(self.began - start, 6), "events": events, "end": end}
        return {"prompt": self.prompt, "status": status, "whole": self.whole, "text": text, **times}


def text_of(event: bytes) -> str:
    """The text in one server-sent event of a chat or a completion."""
    data = event.partition(b"data:")[2].strip()
    if not data.startswith(b"{"):
        return ""
    choices = json.loads(data).get("choices") or []
    return "".join(one.get("text") or (one.get("delta") or {}).get("content") or "" for one in choices)


async def load(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Clients for some seconds, each of which sends its next request when it has its answer."""
    start, numbers, exchanges = time.perf_counter(), itertools.count(), list[Exchange]()

    async def client() -> None:
        while True:
            number = next(numbers) % len(order["bodies"])
            exchanges.append(exchange := Exchange(number, time.perf_counter()))
            with contextlib.suppress(ConnectionError):
                await exchange.run(order["url"], order["bodies"][number])

    clients = asyncio.gather(*(client() for _ in range(order["clients"])))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(clients, order["seconds"])
    return [one.record(start) for one in exchanges]


if __name__ == "__main__":
    json.dump(asyncio.run(load(json.load(sys.stdin))), sys.stdout)
