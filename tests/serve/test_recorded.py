"""Requests of clients that cannot be installed here, as their sources write them.

`vllm bench serve` (vLLM 0.33, benchmarks/lib/endpoint_request_func.py and benchmarks/serve.py)
needs vLLM itself: what it sends, and what it reads of the answer, is written down here.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

import eyas
from serving import PROMPTS, Running

TOKENS = 24
COMMON: dict[str, Any] = {
    "model": "tiny", "repetition_penalty": 1.0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
}  # fmt: skip
COMPLETION = {**COMMON, "prompt": PROMPTS[0], "max_tokens": TOKENS, "logprobs": None, "temperature": 0.0}
CHAT = {
    **COMMON, "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}], "max_completion_tokens": TOKENS,
    "temperature": 0.0,
}  # fmt: skip


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream as that client reads it: events end with an empty line, comments are left out,
    [DONE] is the last."""
    headers = {"x-request-id": "bench-0", "authorization": "Bearer EMPTY"}
    with httpx2.stream("POST", server.v1 + path, json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        text = "".join(answer.iter_text())
    messages = [event.removeprefix("data: ") for event in text.split("\n\n") if event and not event.startswith(":")]
    assert messages[-1] == "[DONE]"
    return [json.loads(message) for message in messages[:-1]]


def test_bench_completions(server: Running, llm: eyas.LLM) -> None:
    """The first chunk with choices is the first token; the chunk without choices has the usage."""
    *chunks, last = events(server, "/completions", COMPLETION)
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks)
        == llm.generate(PROMPTS[0], raw=True, max_new_tokens=TOKENS, ignore_eos=True).text
    )
    assert not last["choices"]
    assert last["usage"]["completion_tokens"] == TOKENS


def test_bench_chats(server: Running) -> None:
    """An empty content with the role is no token; content parts of type text are read."""
    *chunks, last = events(server, "/chat/completions", CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not deltas[0]["content"]
    assert any(delta.get("content") for delta in deltas)  # how many depends on the threads: what waits is joined
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], TOKENS)


@pytest.mark.slow
def test_bench_speculation(server: Running) -> None:
    """Acceptance is the difference of counters before and after; only lines with these names are read."""

    def counters() -> dict[str, float]:
        lines = httpx2.get(f"{server.url}/metrics", timeout=120).text.splitlines()
        found = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:spec_decode") and "_total" in line)
        return {name: float(value) for name, value in found}

    def total(name: str, when: dict[str, float]) -> float:
        return sum(value for key, value in when.items() if key.startswith(f"vllm:spec_decode_{name}_total"))

    before = counters()
    events(server, "/completions", COMPLETION)
    after = counters()
    drafts, tokens, accepted, by_position = (
        total(name, after) - total(name, before)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    )
    assert 0 < drafts <= tokens
    assert 0 < accepted == by_position <= tokens
    assert any('position="0"' in key for key in after)


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_bench_first_asks(server: Running, path: str) -> None:
    """It waits until the server is ready, and takes the model's name and its root from the list."""
    answer = httpx2.get(server.url + path, timeout=120)
    assert answer.status_code == 200
    if path == "/v1/models":
        assert {"id", "root"} <= answer.json()["data"][0].keys()
