"""What stands before Ray's proxy: requests are repeated, streams end with an error, nothing is answered twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eyas_ray.gate import SESSION_HEADER, Gate
from eyas_ray.sessions import session_of

EVENTS = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json"), (b"x-request-id", b"ours")]


def start(headers: Sequence[tuple[bytes, bytes]] = JSON, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Proxy:
    """Ray's proxy: each try answers with the messages of one script, and returns. A replica that died has sent fewer."""

    def __init__(self, *tries: Sequence[dict[str, Any]]) -> None:
        self.tries = list(tries)
        self.bodies: list[bytes] = []
        self.sessions: list[bytes | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.sessions.append(dict(scope["headers"]).get(SESSION_HEADER))
        for message in self.tries.pop(0):
            await send(message)


def answers(
    proxy: Callable[..., Any], body: bytes = b"{}", path: str = "/v1/chat/completions", gate: Gate | None = None
) -> list[dict[str, Any]]:
    """What the client gets for one request, whose body comes in two pieces."""
    sent: list[dict[str, Any]] = []
    pieces = [
        {"type": "http.request", "body": body[:1], "more_body": True},
        {"type": "http.request", "body": body[1:], "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run((gate or Gate(proxy, (0.0, 0.0, 0.0)))(scope, receive, send))
    return sent


def body_of(messages: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


@pytest.mark.parametrize("lost", [[], [start()], [start(EVENTS), part(b": keep-alive\n\n", True)]])
def test_a_request_that_had_not_begun_is_repeated(lost: list[dict[str, Any]]) -> None:
    """Guards against a lost request, and against two starts of one response."""
    headers = lost[0]["headers"] if lost else JSON
    proxy = Proxy(lost, [start(headers), part(b"whole")])
    sent = answers(proxy, b'{"a": 1}')
    assert proxy.bodies == [b'{"a": 1}'] * 2
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert body_of(sent).endswith(b"whole")
    assert len(lost) == 2 or (b"x-eyas-tries", b"2") in sent[0]["headers"]
    assert not sent[-1]["more_body"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_had_begun_ends_with_an_error(path: str) -> None:
    """Guards against a client that takes half an answer for a whole one, and against an answer that is given twice."""
    proxy = Proxy([start(EVENTS), part(b"data: half\n\n", True)], [start(EVENTS), part(b"data: again\n\n")])
    sent = answers(proxy, path=path)
    text = body_of(sent).decode()
    assert len(proxy.bodies) == 1
    assert text.startswith("data: half\n\n")
    assert "again" not in text
    event = json.loads(text.rpartition("data: ")[2])
    assert "died" in json.dumps(event)
    assert not sent[-1]["more_body"]


def test_a_body_that_had_begun_has_no_end() -> None:
    """Guards against half of a JSON object that is closed as if it were whole: the server cuts the connection."""
    sent = answers(Proxy([start(), part(b'{"a":', True)]))
    assert sent[-1]["more_body"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_no_replica_is_left(path: str) -> None:
    """Guards against endless tries, against an empty response, and against an error in another dialect's form."""
    proxy = Proxy([], [], [])
    sent = answers(proxy, path=path)
    assert sent[0]["status"] == 503
    body = json.loads(body_of(sent))
    assert body["error"].get("code") == (None if "/messages" in path else "replica_lost")
    assert (body.get("type") == "error") == ("/messages" in path)
    assert proxy.tries == []


def test_errors_of_a_replica_are_answers() -> None:
    """Guards against repeating a request that a replica has refused or failed: it would fail everywhere."""
    proxy = Proxy([start([*JSON, (b"x-request-id", b"Ray's")], 500), part(b"fault")], [start(), part(b"again")])
    sent = answers(proxy)
    assert (sent[0]["status"], body_of(sent)) == (500, b"fault")
    assert sent[0]["headers"] == JSON  # with one id


def chat(*texts: str, **more: Any) -> bytes:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"messages": messages, **more}).encode()


def test_turns_of_a_conversation_are_one_session() -> None:
    """Guards against turns that go to replicas that do not hold the turns before."""
    first = session_of(chat("Be brief.", "Hello"))
    assert first == session_of(chat("Be brief.", "Hello", "Hi.", "And now?"))
    assert first != session_of(chat("Be brief.", "Good morning"))
    assert session_of(chat("a", "b", prompt_cache_key="k")) == session_of(chat("c", "d", prompt_cache_key="k"))
    assert session_of(b'{"prompt": "Once"}') == session_of(b'{"prompt": ["Once", "Twice"]}')
    assert session_of(b'{"prompt": [1, 2]}') != session_of(b'{"prompt": [2, 1]}')
    assert session_of(chat("a", "b", session_id="k")) == session_of(chat("c", "d", session_id="k"))
    assert session_of(b"not JSON") is session_of(b"[]") is session_of(b'{"prompt": ""}') is None


@pytest.mark.parametrize("size", [1, 2**20])
def test_claude_code_stays_in_its_session(size: int) -> None:
    """Guards against another replica for each turn: the first block of Claude Code's system text differs each time."""

    def turn(number: str, text: str = "Hi") -> str | None:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        messages = [{"role": "user", "content": text}]
        body = {"system": [line, {"type": "text", "text": "You help."}], "messages": messages, "tools": ["x" * size]}
        return session_of(json.dumps(body).encode())

    assert turn("36ee5") == turn("0aaa9")
    assert turn("36ee5") != turn("36ee5", "Hello")
    line = "x-anthropic-billing-header: cch=%s;\nYou help."
    assert session_of(chat(line % "36ee5", "Hi")) == session_of(chat(line % "0aaa9", "Hi"))


def test_a_response_is_continued_where_it_is_remembered() -> None:
    """Guards against `previous_response_id` at a replica that does not know it: the id is all that such a request has."""
    proxy = Proxy([start(), part(b'{"id":"resp_7", "output": []}')], [start(), part(b"{}")], [start(), part(b"{}")])
    gate = Gate(proxy)
    for body in (
        {"input": "Hello"},
        {"previous_response_id": "resp_7", "input": "And?"},
        {"previous_response_id": "x"},
    ):
        answers(proxy, json.dumps(body).encode(), "/v1/responses", gate)
    first, second, unknown = proxy.sessions
    assert first is not None
    assert first == second
    assert unknown is None
