"""`eyas serve` as a process: where it listens, how it ends, what it writes."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import processes
from eyas import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (tiny.FOLDER / tiny.PACKED).exists(), reason="the embedded model's weights are not in this checkout"
    ),
]
SECRET = "a prompt that belongs in no log"
SECONDS = 600  # that a response may take on a busy machine


class Process:
    """A server with the file that its stderr goes to."""

    def __init__(self, process: subprocess.Popen[Any], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def url(self) -> str:
        match = re.search(r"http://[\d.]+:\d+", self.log.read_text())
        assert match is not None
        return match[0]

    def wait_for(self, text: str) -> None:
        processes.wait_until(lambda: text in self.log.read_text(), self.process)

    def ended(self) -> int:
        processes.finish(self.process)
        return int(self.process.returncode)


COMMAND = (sys.executable, "-m", "eyas", "serve", "--port")


@contextmanager
def served(tmp_path: Path, *options: object, port: int = 0, **environment: str) -> Iterator[Process]:
    """`eyas serve`, by default on a free port, once it listens."""
    command = [*COMMAND, port, "--kernels", "off", "--tree.nodes", 6, "--tree.depth", 3, *options]
    log, variables = tmp_path / "log", processes.environment(**environment)
    with (
        log.open("wb") as stderr,
        processes.started(command, True, stderr=stderr, stdout=subprocess.PIPE, env=variables) as child,
    ):
        made = Process(child, log)
        made.wait_for("serving")
        yield made


def asked(url: str, key: str = "s3cret", **more: Any) -> dict[str, Any]:
    """The arguments of a request."""
    body = {"prompt": SECRET, "max_tokens": 100, "temperature": 0, "ignore_eos": True, **more}
    headers = {"authorization": f"Bearer {key}"}
    return {"url": f"{url}/v1/completions", "json": body, "headers": headers, "timeout": SECONDS}


def ask(url: str, key: str = "s3cret", **more: Any) -> httpx2.Response:
    return httpx2.post(**asked(url, key, **more))


def get(url: str) -> httpx2.Response:
    return httpx2.get(url, timeout=SECONDS)


def arrived(url: str) -> float:
    """How many requests run, wait or have ended: a request that comes later than the signal is refused."""
    kinds = "num_requests_running|num_requests_waiting|request_success_total"
    return sum(map(float, re.findall(rf"^vllm:(?:{kinds}){{.*}} (\S+)$", get(f"{url}/metrics").text, re.MULTILINE)))


@pytest.mark.exhaustive
def test_sigterm_under_load(tmp_path: Path) -> None:
    """Running answers end whole, new ones get 503 and the probe fails; then the process ends with
    status 0.

    Every line of the log is JSON and names requests; no prompt and no key is in it. A long answer, which is given up
    afterwards, keeps the server from ending before it has been asked.
    """
    options = ("--rows", 3, "--name", "mine", "--json-logs", "--drain", 600)
    with served(tmp_path, *options, EYAS_API_KEY="s3cret") as server, ThreadPoolExecutor(3) as pool:
        url = server.url
        assert ask(url, "wrong").status_code == 401
        with httpx2.stream("POST", **asked(url, stream=True, max_tokens=3000)):
            running = [pool.submit(ask, url), pool.submit(ask, url, stream=True), pool.submit(ask, url, model="mine")]
            processes.wait_until(lambda: arrived(url) == 4, server.process)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("shutting down")
            assert ask(url).status_code == 503
            assert get(f"{url}/health").status_code == 503
        answers = [one.result() for one in running]
        assert [answer.json()["usage"]["completion_tokens"] for answer in (answers[0], answers[2])] == [100, 100]
        assert answers[1].text.endswith("data: [DONE]\n\n")
        assert server.ended() == 0
        log = server.log.read_text()
        # notes from before it listens
        lines = [json.loads(line) for line in log.splitlines() if not line.startswith("eyas: ")]
        statuses = sorted(line["status"] for line in lines if line.get("path") == "/v1/completions")
        assert statuses == [200, 200, 200, 200, 401, 503]
        assert SECRET not in log
        assert "s3cret" not in log


@pytest.mark.exhaustive
def test_three_signals_and_a_start_on_the_same_port(tmp_path: Path) -> None:
    """A third signal ends a server at once with status 1, without a traceback; after kill -9, too, another
    server gets the port at once."""
    port = processes.unused_port()
    with ThreadPoolExecutor(1) as pool:
        with served(tmp_path, port=port) as server:
            lost = pool.submit(ask, server.url, max_tokens=3000)
            processes.wait_until(lambda: arrived(server.url) == 1, server.process)
            server.process.send_signal(signal.SIGINT)
            server.wait_for("shutting down")  # signals that come before one is handled are one with it
            for _ in range(2):
                server.process.send_signal(signal.SIGINT)
            assert server.ended() in (0, 1)  # 0: the third came before the second was handled
            assert "Traceback" not in server.log.read_text()
            assert lost.exception() is not None or lost.result().status_code >= 500
        with served(tmp_path, port=port) as server:
            assert get(f"{server.url}/health").status_code == 200
            server.process.kill()
            server.process.wait()
