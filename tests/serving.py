"""Servers of tests: the application in a thread of this process, on a free port of the loopback."""

import asyncio
import json
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import uvicorn

import eyas
from eyas import tiny
from eyas.serve.app import make_app
from eyas.serve.server import Server
from eyas.serve.service import Service
from eyas.serve.settings import Settings

TREE = {"nodes": 6, "depth": 3, "branch": 2}  # drafts in every cycle, at little cost
PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "I would like to see a movie tonight.",
    "Can you tell me what the weather is like?",
    "Tell me a story about a hat.",
)

TOOL_TEMPLATE = (
    "{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m['role'] == 'tool' else m['role'] }}|>\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments']['day'] }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOOL_RESPONSE = {
    "start_anchor": "<|assistant|>\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
DAYS = {"day": {"enum": ["today", "tomorrow"]}}
DAY = {"type": "object", "properties": DAYS, "required": ["day"], "additionalProperties": False}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"day": "today"}}</tool_call>'
WRITTEN = f"<think>Hm.</think>Let me see.{CALL}{CALL}"  # what a model with tools writes


def small_llm(**options: Any) -> eyas.LLM:
    """The embedded model with a fixed tree: no policy, so that every run does the same work."""
    return eyas.load(**{"tree": TREE, **options})


def tooled_llm() -> eyas.LLM:
    """The same with a chat template that has a place for tools, and a response template that tells
    how calls are written."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, TOOL_RESPONSE
    return small_llm(tokenizer=tokenizer)


SECONDS = 120  # that a response may take on a busy machine
URL_VARIABLE = "EYAS_SERVER_URL"  # where a server listens already that the contract is tested with


class Remote:
    """A server somewhere, with its clients."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._clients: list[openai.OpenAI] = []

    @property
    def v1(self) -> str:
        """The base URL for clients of OpenAI."""
        return f"{self.url}/v1"

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request without a client library between."""
        return httpx2.request(method, self.url + path, **{"timeout": SECONDS, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """Send a JSON body."""
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Ask for a path."""
        return self.request("GET", path, **options)

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client; it does not try again unless told."""
        client = openai.OpenAI(**{"base_url": self.v1, "api_key": "none", "max_retries": 0, **options})
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        """Close their connections."""
        while self._clients:
            self._clients.pop().close()

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(**{"base_url": self.v1, "api_key": "none", "max_retries": 0, **options})


def curl(server: Remote, line: str) -> httpx2.Response:
    """Send what a line of curl on a page sends to port 8000, to this server."""
    url, *options = shlex.split(line)[1:]
    assert {*options[::2]} <= {"-H", "-d"}, line
    given = [*zip(options[::2], options[1::2], strict=True)]
    headers = dict(value.split(": ", 1) for option, value in given if option == "-H")
    (body,) = [value for option, value in given if option == "-d"]
    return server.request("POST", url.removeprefix("http://127.0.0.1:8000"), content=body.encode(), headers=headers)


class Running(Remote):
    """A server in this process, with its clients."""

    def __init__(self, service: Service, server: Server, port: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self.service = service
        self.server = server

    def wait_until_idle(self) -> None:
        """Wait until no sequence is left."""
        while not self.service.engine.idle:
            time.sleep(0.005)


def events(response: httpx2.Response) -> list[Any]:
    """The data of each event of a stream, in order; `[DONE]` as text."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def running(
    llm: eyas.LLM,
    *,
    keys: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    pools: Any = None,
    heads: Any = None,
    **settings: Any,
) -> Iterator[Running]:
    """A server of this model."""
    service = Service(llm, Settings(**{"name": "tiny", "max_tokens": 512, **settings}), pools, heads)
    config = uvicorn.Config(
        make_app(service, keys, origins), access_log=False, log_config=None, timeout_graceful_shutdown=1
    )
    server = Server(config, service, drain_seconds=30)
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # for another protocol asyncio waits for more to send
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server has not started"
                time.sleep(0.005)
            made = Running(service, server, listening.getsockname()[1])
            yield made
            made.close_clients()
        finally:
            server.should_exit = True
            thread.join()
