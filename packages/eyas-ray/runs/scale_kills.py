"""Replicas that are killed under load: is a request lost, or answered twice?

    python packages/eyas-ray/runs/scale_kills.py --output docs/results/scale_kills.json --kills 10

`eyas serve --replicas N` with the embedded model on a free port of the loopback. Clients ask it for greedy texts, every
second one as a stream, while one replica after another gets SIGKILL; the next one when as many as before serve again.
Every answer is compared with the text that the same prompt had before the first kill:

    whole       the text, with one end
    broken      a stream that had begun: a beginning of the text, then an error event
    lost        no answer, or an error before it began
    doubled     more than the text, or a second end
    wrong       another text
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import parser, run, write
from _servers import Process, served

PROMPTS = [f"Tell me {what} {how}." for what in ("a story", "about the weather", "a joke") for how in
           ("now", "please", "at length", "again")]  # fmt: skip
REPLICA = "ray::ServeReplica"
TREE = ("--tree.nodes", 6, "--tree.depth", 3, "--tree.branch", 2)


@dataclass
class Load:
    """The clients, and what they got."""

    url: str
    tokens: int
    expected: dict[str, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    repeated: int = 0  # whole answers that a second replica gave
    faults: list[str] = field(default_factory=list)
    running: int = 0
    ended: bool = False

    async def client(self, number: int) -> None:
        """Ask until the end."""
        choices = random.Random(number)
        async with httpx2.AsyncClient(timeout=300) as http:
            while not self.ended:
                prompt, stream = choices.choice(PROMPTS), choices.random() < 0.5
                self.running += 1
                try:
                    outcome = await self._ask(http, prompt, stream)
                except Exception as error:
                    outcome = "lost"
                    self.faults.append(f"{type(error).__name__}: {error}"[:200])
                self.running -= 1
                self.outcomes[f"{'stream' if stream else 'body'} {outcome}"] += 1

    async def _ask(self, http: httpx2.AsyncClient, prompt: str, stream: bool) -> str:
        body = {"prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            content = (await response.aread()).decode()
        if response.status_code != 200:
            self.faults.append(f"{response.status_code} {content[:150]}")
            return "lost"
        self.repeated += "x-eyas-tries" in response.headers
        text, ends, error = read_events(content) if stream else read_body(content)
        expected = self.expected.setdefault(prompt, text)
        if ends > 1 or (text != expected and text.startswith(expected)):
            return "doubled"
        if error:
            return "broken" if ends == 0 and expected.startswith(text) else "wrong"
        return "whole" if (text, ends) == (expected, 1) else "wrong"


def read_body(content: str) -> tuple[str, int, str]:
    """Return the text of an answer, how often it ends, and no error."""
    return json.loads(content)["choices"][0]["text"], 1, ""


def read_events(content: str) -> tuple[str, int, str]:
    """Return the text of a stream, how often it ends, and its error."""
    text, ends, error = "", 0, ""
    for line in content.splitlines():
        if line == "data: [DONE]":
            ends += 1
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            error = error or event.get("error", {}).get("message", "")
            text += "".join(choice["text"] for choice in event.get("choices", ()))
    return text, ends, error


def replicas_of(process: Process) -> list[psutil.Process]:
    """Return the processes of the replicas that a fleet has started."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.cmdline()[:1] and child.cmdline()[0].startswith(REPLICA):
                found.append(child)
        except psutil.Error:
            continue
    return found


async def serving_replicas(url: str) -> int:
    """Return how many replicas have metrics on the page."""
    try:
        async with httpx2.AsyncClient(timeout=30) as http:
            page = (await http.get(f"{url}/metrics")).text
    except httpx2.HTTPError:
        return 0
    return page.count("\nvllm:num_requests_running{")


async def measure(url: str, process: Process, options: Any) -> dict[str, Any]:
    """Kill replicas under load, and return what became of the requests."""
    load = Load(url, options.tokens)
    async with httpx2.AsyncClient(timeout=300) as http:
        for prompt in PROMPTS:
            await load._ask(http, prompt, stream=False)
    clients = [asyncio.create_task(load.client(i)) for i in range(options.clients)]
    seconds = []
    for number in range(options.kills):
        await asyncio.sleep(random.Random(number).uniform(1, 4))
        victim = random.Random(number).choice(replicas_of(process))
        killed = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        while await serving_replicas(url) >= options.replicas and time.monotonic() - killed < 30:
            await asyncio.sleep(0.2)
        while await serving_replicas(url) < options.replicas:
            await asyncio.sleep(0.5)
        seconds.append(round(time.monotonic() - killed, 1))
        print(
            f"kill {number + 1}: {seconds[-1]} s until {options.replicas} serve again; {dict(load.outcomes)}",
            file=sys.stderr,
        )
    load.ended = True
    await asyncio.gather(*clients)
    sums = Counter({name: 0 for name in ("whole", "broken", "lost", "doubled", "wrong")})
    for outcome, count in load.outcomes.items():
        sums[outcome.split()[1]] += count
    return {
        "kills": options.kills,
        "requests": sum(sums.values()),
        **sums,
        "repeated": load.repeated,
        "by kind": dict(sorted(load.outcomes.items())),
        "seconds until all serve again": seconds,
        "faults": load.faults[:20],
    }


def main() -> None:
    options = parser(__doc__, kills=10, replicas=2, clients=6, rows=4, tokens=48).parse_args()
    command = [sys.executable, "-m", "eyas", "serve", "--port", "{port}", "--replicas", options.replicas,
               "--rows", options.rows, *TREE]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, served(command, Path(folder) / "log", 120) as (url, process):
        figures = asyncio.run(measure(url, process, options))
    write(options.output, figures)
    if figures["lost"] or figures["doubled"] or figures["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
