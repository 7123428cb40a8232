"""Clients that misbehave, in numbers: does the server come back to where it was, and does every
answer belong to its request?

    python runs/serve_faults.py --output docs/results/serve_faults.json

One `eyas serve` with the embedded model on a free port of the loopback, as a process of its own,
goes through

    hang-ups    clients that close their connection at a random moment: before the body is whole, in the queue, in a stream
    bodies      malformed ones, by seeded mutations of good bodies
    readers     that take a stream byte by byte, beside clients in a hurry
    overflow    more requests at once than rows and queue hold
    soak        many short requests; each text is compared with `LLM.generate`, and the process's memory is read on the way
    SIGTERM     under load

After each the engine must be empty and answer as at the beginning.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
from _common import machine, parser, run, write
from _servers import served

import eyas

JSON = {"content-type": "application/json"}
PROMPTS = [f"Tell me {what} {how}." for what in ("a story", "about the weather", "what you like", "a joke") for how in
           ("now", "please", "in short", "at length", "again", "slowly", "once more", "for my sister")]  # fmt: skip
QUEUE = 64
JUNK = (
    None, True, -1, 0, 10**30, 1.5, "", "x", "\u20ac" * 50, [], [[]], {}, {"a": [1, {"b": None}]}, [1, "a"], [-1], [10**9],
)  # fmt: skip
Texts = dict[tuple[str, int], str]  # (prompt, tokens) -> the answer


@dataclass(frozen=True)
class Server:
    """`eyas serve` as a child process."""

    url: str
    process: subprocess.Popen[bytes]

    def megabytes(self) -> int:
        """Resident memory, MiB."""
        return int(psutil.Process(self.process.pid).memory_info().rss) >> 20


class Client:
    """Asks, and compares with the right answers."""

    def __init__(self, server: Server, right: Texts) -> None:
        self.server, self.right, self.wrong = server, right, 0
        limits = httpx2.Limits(max_connections=600, max_keepalive_connections=600)
        self.http = httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits)

    async def ask(self, prompt: str, tokens: int, stream: bool = False) -> int:
        """Ask once; returns the status, and counts a text that is another's."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code == 200:
            self.wrong += text_of(response, stream) != self.right[prompt, tokens]
        return response.status_code

    async def settle(self) -> dict[str, Any]:
        """Wait until the engine is empty; the state that it is in then."""
        began = time.monotonic()
        while True:
            stats = (await self.http.get("/stats")).json()
            if not stats["running"] and not stats["waiting"]:
                break
            await asyncio.sleep(0.02)
        status = await self.ask(PROMPTS[0], 16)
        seconds = round(time.monotonic() - began, 2)
        return {"seconds_until_empty": seconds, "status_after": status, "MiB": self.server.megabytes()}


def text_of(response: httpx2.Response, stream: bool) -> str:
    """The text of a completion, whole or streamed."""
    if not stream:
        return str(response.json()["choices"][0]["text"])
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in data for choice in json.loads(line).get("choices", []))


async def bounded(count: int, at_once: int, work: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """`work` for 0..count - 1, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(i: int) -> Any:
        async with gate:
            return await work(i)

    return await asyncio.gather(*(one(i) for i in range(count)))


async def hang_ups(client: Client, count: int) -> dict[str, Any]:
    """Connections that are closed at random moments."""
    dice = random.Random(0)

    async def one(i: int) -> str:
        body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 256, "ignore_eos": True, "stream": i % 2 == 0}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode()
        address = urlsplit(client.server.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        sent = (head + content)[: dice.randrange(len(head + content)) if i % 4 == 0 else None]
        writer.write(sent)
        await writer.drain()
        began = b""
        try:
            async with asyncio.timeout(dice.uniform(0, 2)):
                began = await reader.read(100)
                while await reader.read(dice.randrange(1, 4000)):
                    pass
        except TimeoutError:
            pass
        writer.close()
        return "in the body" if len(sent) < len(head + content) else "in the answer" if began else "before the answer"

    return dict(Counter(await bounded(count, 100, one)))


async def bodies(client: Client, count: int) -> dict[str, Any]:
    """Malformed bodies: a field of a good one is replaced, or its end is cut off, or some of its
    bytes are changed."""
    dice = random.Random(1)
    common = {"max_tokens": 2, "n": 1, "stop": ["x"], "stream": False, "temperature": 0.5, "top_p": 0.9, "seed": 1, "logit_bias": {},
              "stream_options": {}, "speculation": "auto"}  # fmt: skip
    good: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", **common},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], **common},
        "/v1/responses": {"input": "Hi", **common},
        "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
        "/detokenize": {"tokens": [5, 6]},
    }

    async def one(i: int) -> str:
        path = dice.choice(list(good))
        body = {**good[path], dice.choice(list(good[path])): dice.choice(JUNK)} if i % 2 else good[path]
        content = json.dumps(body).encode()
        if i % 4 == 0:
            content = content[: dice.randrange(len(content))]
        elif i % 4 == 2:
            content = bytes(byte ^ (dice.random() < 0.02) * dice.randrange(256) for byte in content)
        response = await client.http.post(path, content=content, headers=JSON)
        return str(response.status_code)

    return dict(Counter(await bounded(count, 8, one)))


async def readers(client: Client, count: int) -> dict[str, Any]:
    """Slow readers of streams, beside others."""

    async def slow(i: int) -> int:
        body = {"prompt": PROMPTS[i], "max_tokens": 16, "temperature": 0, "stream": True}
        received = b""
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            async for part in response.aiter_bytes(64):
                received += part
                await asyncio.sleep(0.02)
        return received.endswith(b"data: [DONE]\n\n")

    slow_ones = asyncio.gather(*(slow(i) for i in range(count)))
    statuses = await bounded(4 * count, 4, lambda i: client.ask(PROMPTS[i % len(PROMPTS)], 16))
    return {"slow_streams_whole": sum(await slow_ones), "others": dict(Counter(map(str, statuses)))}


async def overflow(client: Client, count: int) -> dict[str, Any]:
    """More requests at once than fit."""
    statuses = await bounded(count, count, lambda i: client.ask(PROMPTS[i % len(PROMPTS)], 16, stream=i % 3 == 0))
    return dict(Counter(map(str, statuses)))


async def soak(client: Client, count: int, at_once: int) -> dict[str, Any]:
    """Many requests, with the memory on the way."""
    memory, began, part = [client.server.megabytes()], time.monotonic(), max(1, count // 10)
    statuses = Counter[str]()
    for _ in range(10):
        done = await bounded(
            part, at_once, lambda i: client.ask(PROMPTS[i % len(PROMPTS)], 16 if i % 7 else 4, stream=i % 3 == 0)
        )
        statuses.update(map(str, done))
        memory.append(client.server.megabytes())
    speed = round(10 * part / (time.monotonic() - began), 1)
    return {"statuses": dict(statuses), "MiB": memory, "requests_per_second": speed}


async def sigterm(client: Client, count: int) -> dict[str, Any]:
    """The end under load."""
    asked = [asyncio.ensure_future(client.ask(PROMPTS[i % len(PROMPTS)], 16, stream=i % 2 == 0)) for i in range(count)]
    while (await client.http.get("/stats")).json()["running"] < 1:
        await asyncio.sleep(0.005)
    client.server.process.send_signal(signal.SIGTERM)
    late = await asyncio.gather(*(client.ask(PROMPTS[0], 16) for _ in range(4)), return_exceptions=True)
    statuses = await asyncio.gather(*asked)
    code = await asyncio.to_thread(client.server.process.wait, 120)
    after = Counter(str(one) if isinstance(one, int) else type(one).__name__ for one in late)
    answered = dict(Counter(map(str, statuses)))
    return {"statuses": answered, "after_the_signal": dict(after), "exit_status": code}


async def all_of_it(server: Server, right: Texts, args: Any) -> dict[str, Any]:
    """Everything, one thing after the other."""
    client, record = Client(server, right), dict[str, Any]()
    await soak(client, 500, args.at_once)  # caches of allocators and connections fill
    record["at the beginning"] = await client.settle()
    for name, work in {
        "hang-ups": hang_ups(client, args.clients),
        "malformed bodies": bodies(client, args.bodies),
        "slow readers": readers(client, 20),
        "overflow": overflow(client, 400),
        "soak": soak(client, args.requests, args.at_once),
    }.items():
        record[name] = {"found": await work, **await client.settle()}
        print(name, record[name], flush=True)
    record["SIGTERM"] = await sigterm(client, 60)
    record["texts of another request"] = client.wrong
    await client.http.aclose()
    return record


def main() -> None:
    args = parser(__doc__, clients=500, bodies=200, requests=10_000, at_once=32, rows=8, log=None).parse_args()
    llm = eyas.load()
    right = {(p, n): llm.generate(p, raw=True, max_new_tokens=n).text for p in PROMPTS for n in (4, 16)}
    options = f"--port {{port}} --rows {args.rows} --queue {QUEUE} --max-tokens 256".split()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(args.log) if args.log else Path(folder) / "log"
        with served([sys.executable, "-m", "eyas", "serve", *options], log) as (url, process):
            record = asyncio.run(all_of_it(Server(url, process), right, args))
        lines = log.read_text().splitlines()
    record["errors in the log"] = sum(" ERROR " in line or "Traceback" in line for line in lines)
    write(args.output, {"machine": machine(), "rows": args.rows, "queue": QUEUE, "found": record})
    print(json.dumps(record["SIGTERM"]), "texts of another request:", record["texts of another request"])


if __name__ == "__main__":
    run(main)
