"""Servers as deployments: where ids are found, fields that a server refuses, answers cut before their end token, errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eyas.core.params import Sampling
from eyas.errors import InputError
from eyas_lab.audit.deployments import Ask
from eyas_lab.audit.report import greedy_lines
from eyas_lab.audit.server import ServerDeployment

IDS, LOGPROBS = [5, 6, 7], [-0.5, -1.0, -0.25]
Answering = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
VLLM = {"token_ids": IDS, "logprobs": {"tokens": ["a", "b", "c"], "token_logprobs": LOGPROBS}}
OLDER_VLLM = {"logprobs": {"tokens": [f"token_id:{i}" for i in IDS], "token_logprobs": LOGPROBS}}
LLAMA_CPP = {"logprobs": {"content": [{"id": i, "logprob": p} for i, p in zip(IDS, LOGPROBS, strict=True)]}}


def ok(finish: str = "length", count: int = 3, **choice: Any) -> tuple[int, dict[str, Any]]:
    choice = {"text": "abc", "finish_reason": finish, **choice}
    return 200, {"choices": [choice], "usage": {"completion_tokens": count}}


class Server:
    """A server that answers completions as a test says; keeps the bodies."""

    def __init__(self) -> None:
        self.answer: Answering = lambda body: ok(**VLLM)
        self.bodies: list[dict[str, Any]] = []
        self.metrics = b"<html>"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _send(self, status: int, content: Any) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                pages: dict[str, Any] = {"/v1/models": {"data": [{"id": "m"}]}, "/metrics": outer.metrics}
                self._send(200, pages.get(self.path, b"<html>"))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append({**body, "key": self.headers.get("Authorization")})
                self._send(*outer.answer(body))

            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def deployment(self, **options: Any) -> ServerDeployment:
        return ServerDeployment(self.url, lambda text: [ord(c) for c in text], (2,), **options)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


GREEDY: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 4}


@pytest.mark.parametrize(("choice", "place"), [(VLLM, "token_ids"), (OLDER_VLLM, "logprobs"), (LLAMA_CPP, "logprobs")])
def test_ids_of_each_kind_of_server(server: Server, choice: dict[str, Any], place: str) -> None:
    """Guards the three forms in which servers give ids, and their log-probabilities."""
    server.answer = lambda body: ok(**choice)
    deployment = server.deployment(key="k", extra={"min_p": 0})
    answer = deployment.generate([1, 2], **GREEDY)
    assert (deployment.ids_from, answer.ids, answer.logprobs) == (place, tuple(IDS), tuple(LOGPROBS))
    assert deployment.name == f"m at {server.url}"
    last = server.bodies[-1]
    sent = {"prompt": [1, 2], "max_tokens": 3, "seed": 4, "min_p": 0, "key": "Bearer k"}
    assert sent.items() <= last.items()
    assert "top_k" not in last  # 0 has another meaning elsewhere


def test_further_fields_do_not_replace_what_is_audited(server: Server) -> None:
    """Guards the verdict: llama.cpp takes the 40 most probable tokens unless it is told `top_k` 0, which must not be
    said where a `top_k` is audited."""
    server.answer = lambda body: ok(**LLAMA_CPP)
    deployment = server.deployment(extra={"top_k": 0})
    deployment.generate([1, 2], **GREEDY)
    assert server.bodies[-1]["top_k"] == 0
    deployment.generate([1, 2], **{**GREEDY, "temperature": 1.0, "top_k": 3})
    assert server.bodies[-1]["top_k"] == 3


def test_fields_that_a_server_refuses_are_left_out(server: Server) -> None:
    """Guards strict servers: the next form is asked for, down to the text, which is encoded again."""
    server.answer = lambda body: (400, {"error": "?"}) if {"return_token_ids", "logprobs"} & body.keys() else ok()
    deployment = server.deployment()
    assert deployment.generate([1], **GREEDY).ids == (97, 98, 99)
    assert deployment.ids_from == "text"
    server.answer = lambda body: ok(count=9)  # other tokens than the encoding's
    assert deployment.generate([1], **GREEDY).ids == ()


def test_a_server_that_has_drafted_nothing_is_known(server: Server) -> None:
    """Guards audits of servers whose drafts never come: no bias of drafts can be found there."""
    deployment = server.deployment()
    assert deployment.draft_tokens() is None
    name = b"vllm:spec_decode_num_draft_tokens_total"
    server.metrics = b'# HELP %s drafts\n%s{engine="0"} 0.0\nother_total 7.0\n' % (name, name)
    assert deployment.draft_tokens() == 0
    server.metrics = b'%s{engine="0"} 3.0\n%s{engine="1"} 4.0\n' % (name, name)
    assert deployment.draft_tokens() == 7
    equal = ("prompts", "equals_itself", "plain_equals_itself", "equals_plain", "together_equals_alone", "tokens")
    none = {"flips": [], "errors": [], "tokens_per_cycle": None, "logprobs": None, "draft_tokens": 0}
    lines = greedy_lines({**dict.fromkeys(equal, 1), "together_at_once": True, **none})
    assert lines[-1] == "The server has drafted 0 tokens since it started: this says nothing about drafts."


def test_an_end_token_that_is_left_out_is_put_back(server: Server) -> None:
    """Guards the statistics: without it, tokens would be judged that were drawn given that none of them ends the text."""
    server.answer = lambda body: ok("stop", **VLLM)
    assert server.deployment().generate([1], **{**GREEDY, "max_new_tokens": 9}).ids == (*IDS, 2)
    server.answer = lambda body: ok("stop", token_ids=[5, 2])
    assert server.deployment().generate([1], **GREEDY).ids == (5, 2)


def test_several_at_a_time(server: Server) -> None:
    """Guards the order of the answers, and that requests overlap."""
    barrier = threading.Barrier(3, timeout=600)

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["max_tokens"] == 1:
            barrier.wait()
        return ok(token_ids=[body.get("seed", 0)])

    server.answer = answer
    asks = [Ask((1,), 1, Sampling(1.0, seed=seed)) for seed in (7, 8, 9)]
    deployment = server.deployment(rows=3)
    deployment.probe([1])
    assert [made.ids for made in deployment.generate_together(asks)] == [(7,), (8,), (9,)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [((500, {}), "HTTP 500"), ((400, {}), "HTTP 400"), ((200, b"<html>"), "answer in JSON"), ((200, {"choices": []}), "without choices")],
)  # fmt: skip
def test_errors_are_one_line(server: Server, answer: Any, words: str) -> None:
    """Guards against tracebacks for what a server does wrong."""
    server.answer = lambda body: answer
    with pytest.raises(InputError, match=words):
        server.deployment().generate([1], **GREEDY)


def test_urls_that_are_not_a_base(server: Server) -> None:
    """Guards against tracebacks where there is no server, against URLs of another kind, and against one without /v1."""
    wrong = {"http://127.0.0.1:9/v1": "does not answer", "file:///etc": "write it as http"}
    for url, words in {**wrong, server.url.removesuffix("/v1"): "does not answer in JSON"}.items():
        with pytest.raises(InputError, match=words):
            ServerDeployment(url, lambda text: [])
