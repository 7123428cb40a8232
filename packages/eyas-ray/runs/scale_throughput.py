"""Answers a second with 1, 2 and 4 processes: `eyas regenerate --workers N`, and `eyas serve --replicas N`.

    python packages/eyas-ray/runs/scale_throughput.py --output docs/results/scale_throughput.json

The embedded model, on this machine's cores, which the processes share. A file is answered twice for each number of
workers, with half of the questions and with all of them; the difference of the two times leaves Ray's start and the
loading of the models out. A server is asked by as many clients as there are rows in all replicas, for a fixed time, after
every client has had an answer. Without --workers (0) is one process without Ray.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

sys.path.append(str(Path(__file__).resolve().parents[3] / "runs"))  # what scripts share
from _common import machine, parser, run, write
from _servers import served

TREE = ("--tree.nodes", "6", "--tree.depth", "3", "--tree.branch", "2")
CORPUS = 1e12  # tokens


def questions(count: int) -> str:
    asked = ({"prompt": f"Tell me a story about number {i}, please."} for i in range(count))
    return "".join(json.dumps(line) + "\n" for line in asked)


def answered(data: Path, output: Path, workers: int, tokens: int) -> tuple[float, int]:
    """Return the seconds of a whole command, and the tokens that it has made."""
    command = [sys.executable, "-m", "eyas", "regenerate", "--data", data, "--output", output, "--json", *TREE]
    command += ["--max-new-tokens", tokens, *(("--workers", workers) if workers else ())]
    began = time.monotonic()
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE)
    return time.monotonic() - began, json.loads(done.stdout.splitlines()[-1])["tokens"]


def file_rate(folder: Path, workers: int, lines: int, tokens: int) -> dict[str, Any]:
    """Return the rate between half of the questions and all of them."""
    figures = []
    for count in (lines // 2, lines):
        data = folder / f"{count}.jsonl"
        data.write_text(questions(count))
        figures.append(answered(data, folder / f"{workers}-{count}.out.jsonl", workers, tokens))
    (half_seconds, half_tokens), (seconds, made) = figures
    rate = (made - half_tokens) / (seconds - half_seconds)
    return {
        "workers": workers,
        "tokens_per_second": round(rate, 1),
        "answers_per_second": round((lines - lines // 2) / (seconds - half_seconds), 3),
        "seconds": [round(half_seconds, 1), round(seconds, 1)],
        "tokens": [half_tokens, made],
        "years_for_1T_tokens": round(CORPUS / rate / 3600 / 24 / 365, 1),
    }


async def asked(url: str, clients: int, seconds: float, tokens: int) -> tuple[int, float]:
    """Return how many answers the clients have had, and the seconds."""
    count, ends = 0, 0.0

    async def client(number: int) -> None:
        nonlocal count
        body = {"prompt": f"Tell me a story about number {number}.", "max_tokens": tokens, "temperature": 0}
        async with httpx2.AsyncClient(timeout=600) as http:
            while time.monotonic() < ends:
                response = await http.post(f"{url}/v1/completions", json={**body, "ignore_eos": True})
                response.raise_for_status()
                count += 1

    ends = time.monotonic() + 1  # every client once: replicas compile nothing and have read their weights
    await asyncio.gather(*(client(number) for number in range(clients)))
    count, began = 0, time.monotonic()
    ends = began + seconds
    await asyncio.gather(*(client(number) for number in range(clients)))
    return count, time.monotonic() - began


def server_rate(folder: Path, replicas: int, options: Any) -> dict[str, Any]:
    """Return the rate of a server with so many replicas."""
    command = [sys.executable, "-m", "eyas", "serve", "--port", "{port}", "--rows", options.rows, *TREE]
    command += ["--replicas", replicas] if replicas else []
    clients = options.rows * max(1, replicas)
    with served(command, folder / f"{replicas}.log", 120) as (url, _):
        count, seconds = asyncio.run(asked(url, clients, options.seconds, options.tokens))
    return {
        "replicas": replicas,
        "clients": clients,
        "answers_per_second": round(count / seconds, 3),
        "tokens_per_second": round(count * options.tokens / seconds, 1),
        "answers": count,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    made = parser(__doc__, numbers=[0, 1, 2, 4], lines=1200, tokens=64, rows=4, seconds=40.0, rounds=2, only="")
    options, before = made.parse_args(), machine()
    files, servers = [], []
    with tempfile.TemporaryDirectory() as name:
        for round_number in range(options.rounds):
            folder = Path(name) / str(round_number)
            folder.mkdir()
            for number in options.numbers:
                if options.only != "serve":
                    files.append(file_rate(folder, number, options.lines, options.tokens))
                    print(files[-1], file=sys.stderr)
                if options.only != "regenerate":
                    servers.append(server_rate(folder, number, options))
                    print(servers[-1], file=sys.stderr)
                write(options.output, {"regenerate": files, "serve": servers}, before, quiet=True)


if __name__ == "__main__":
    run(main)
