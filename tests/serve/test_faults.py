"""Clients and requests that misbehave: no hang, no lost row, no harm to others."""

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import eyas
from eyas.core.requests import Request
from eyas.serve.records import Delta, Job, Totals
from serving import PROMPTS, Running, running
from wishes import wish

pytestmark = pytest.mark.slow
JSON = {"content-type": "application/json"}
LONG: dict[str, Any] = {"max_tokens": 64, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def small(llm: eyas.LLM) -> Iterator[Running]:
    """A server with little room: two rows, a queue of four, short answers."""
    with running(llm, rows=2, queue=4, max_tokens=64, max_sequences=4, keep_alive=0.01) as server:
        yield server


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    """A connection that is kept."""
    with httpx2.Client(timeout=120) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_left(small: Running) -> Iterator[None]:
    """After each test the engine is empty, and still gives the right answer."""
    yield
    small.close_clients()
    small.wait_until_idle()
    engine = small.service.engine
    assert engine.load == (0, 0)
    assert not engine._in_flight
    assert not engine._waiting
    assert all(not any(decoder.rows) and decoder.finished for decoder in engine._pool._decoders.values())
    assert not any(engine._pool._taken.values())
    made = small.post("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "temperature": 0}).json()
    assert made["choices"][0]["text"] == engine.llm.generate("Hello", raw=True, max_new_tokens=8).text


def body(**more: Any) -> bytes:
    return json.dumps({"prompt": PROMPTS[0], "max_tokens": 64, "temperature": 0, "ignore_eos": True, **more}).encode()


def send(server: Running, content: bytes) -> socket.socket:
    """A connection on which a request has been written, and nothing read."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_clients_that_hang_up(small: Running) -> None:
    """Connections are closed at random moments: before the body is whole, in the queue, in the
    middle of a stream. Their rows come back."""
    dice = random.Random(0)
    for i in range(40):
        content = body(stream=bool(i % 2))
        if i % 5 == 0:
            with send(small, content[:-1] if i % 2 else content):
                continue
        with send(small, content) as connection:
            connection.settimeout(dice.uniform(0.0, 0.02))
            try:
                while connection.recv(dice.randrange(1, 2000)):
                    pass
            except TimeoutError:
                pass


def test_a_slow_reader_holds_up_nobody(small: Running, llm: eyas.LLM) -> None:
    """A client that reads nothing of its stream does not keep others waiting, and later finds its answer whole."""
    with send(small, body(stream=True)) as connection:
        quick = small.client().completions.create(model="tiny", prompt=PROMPTS[1], max_tokens=16, temperature=0)
        assert quick.choices[0].text == llm.generate(PROMPTS[1], raw=True, max_new_tokens=16).text
        small.wait_until_idle()
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(7)
    data = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for line in data for choice in json.loads(line)["choices"])
    assert text == llm.generate(PROMPTS[0], raw=True, max_new_tokens=64, ignore_eos=True).text


def test_keep_alive(small: Running) -> None:
    """A stream that waits in the queue sends comments, which OpenAI's client skips.

    Whether the stream waits is up to the threads: one of 20 attempts has to.
    """
    received, long = b"", {"model": "tiny", "prompt": PROMPTS[0], "n": 2, **LONG}
    with small.client(max_retries=3) as client, ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            longer = [pool.submit(client.completions.create, **long) for _ in range(2)]
            with send(small, body(stream=True)) as connection:
                while b"[DONE]" not in received:
                    received += connection.recv(4096)
            assert all(one.result().choices for one in longer)
            if b": keep-alive\n\n" in received:
                break
            received = b""
    assert b": keep-alive\n\n" in received


def test_a_queue_that_overflows(small: Running) -> None:
    """Two rows, four places: of many requests at once some get 429 with Retry-After, which OpenAI's
    client obeys until all are served."""

    async def all_at_once(retries: int, count: int) -> list[Any]:
        async with small.async_client(max_retries=retries) as client:
            asked = [client.completions.create(model="tiny", prompt=PROMPTS[i % 4], **LONG) for i in range(count)]
            return await asyncio.gather(*asked, return_exceptions=True)

    made = asyncio.run(all_at_once(0, 16))
    refused = [one for one in made if isinstance(one, Exception)]
    assert 0 < len(refused) < 16
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
    patient = asyncio.run(all_at_once(8, 8))
    assert not [one for one in patient if isinstance(one, Exception)]


def test_a_deadline(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request gets 408, which the client is told not to repeat; a stream that has begun ends with an error."""
    monkeypatch.setattr("eyas.serve.engine.DEADLINE_CHECK_SECONDS", 0.0)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "n": 4, "max_tokens": 64}
    asked["extra_body"] = {"timeout": 1e-3, "ignore_eos": True}
    with pytest.raises(openai.APIStatusError) as caught:
        small.client(max_retries=5).completions.create(**asked)
    assert caught.value.status_code == 408
    with pytest.raises(openai.APIError, match="time"):
        list(small.client().completions.create(**asked, stream=True))


def poison(tokens: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that breaks the scores after twelve tokens."""
    return scores * float("nan") if tokens.shape[-1] > 12 else scores


def raising(tokens: Tensor, scores: Tensor) -> Tensor:
    raise ZeroDivisionError("a processor with a mistake")


@pytest.mark.parametrize("processor", [poison, raising])
def test_a_poisoned_request(small: Running, llm: eyas.LLM, processor: Any) -> None:
    """One of two requests in flight fails by its processor: it gets an error, the other its right answer."""
    engine = small.service.engine

    async def job(prompt: str, poisoned: bool) -> Totals:
        asked = Job((llm.ids(prompt),), {"max_new_tokens": 40, "temperature": 0.0})
        ((request, reader),) = engine.prepare(asked)
        assert isinstance(request, Request)
        answer = engine.submit(asked, [(wish(request, processors=(processor,) if poisoned else ()), reader)])
        totals = Totals()
        async for delta in answer.deltas():
            assert isinstance(delta, Delta)
            totals.add(delta)
        return totals

    async def both() -> list[Any]:
        return await asyncio.gather(job(PROMPTS[0], True), job(PROMPTS[1], False), return_exceptions=True)

    assert engine._loop is not None
    bad, good = asyncio.run_coroutine_threadsafe(both(), engine._loop).result()
    assert isinstance(bad, eyas.errors.EyasError)
    assert good.text == llm.generate(PROMPTS[1], max_new_tokens=40).text


FIELDS = (
    "prompt", "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "n", "stop", "stop_token_ids", "min_tokens", "stream", "stream_options", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "drafting", "prediction", "cycles", "timeout", "response_format", "regex", "grammar",
    "choice", "tools", "tool_choice", "ignore_eos", "suffix", "best_of", "chat_template_kwargs", "add_special_tokens",
)  # fmt: skip
JUNK = (None, True, False, -1, 0, 2, 10**30, -(10**30), 1.5, 1e300, -1e300, "", "x", "auto", [], [[]], {}, {"5": 1e300}, [1, "a"],
        [-1], [10**30])  # fmt: skip


def test_every_field_with_every_kind_of_value(small: Running, http: httpx2.Client) -> None:
    """A `drafting` of 10^30 reached torch and killed the engine, with every answer in it."""
    good = {"prompt": "Hi", "max_tokens": 3, "timeout": 20}
    for field in FIELDS:
        for value in JUNK:
            content = json.dumps({**good, field: value})
            response = http.post(f"{small.v1}/completions", content=content, headers=JSON)
            assert response.status_code in (200, 400, 404, 408), (field, value, response.status_code, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    st.sampled_from(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
    st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")),
)
def test_bytes_that_are_no_body(small: Running, http: httpx2.Client, path: str, content: bytes) -> None:
    """Any bytes get status 400."""
    response = http.post(small.url + path, content=content, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_a_second_signal(llm: eyas.LLM) -> None:
    """After the first signal an answer goes on; the second gives it up, with an error and not with
    a closed connection."""
    with running(llm, rows=1, max_tokens=4096) as server, ThreadPoolExecutor(1) as pool:
        long = {"prompt": PROMPTS[0], "max_tokens": 4000, "ignore_eos": True}
        asked = pool.submit(server.post, "/v1/completions", long, timeout=600)
        while not server.service.engine.load[0]:
            time.sleep(0.005)
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.get("/health").status_code == 503
        assert not asked.done()
        server.server.handle_exit(signal.SIGINT, None)
        answer = asked.result()
        assert (answer.status_code, "shut down" in answer.json()["error"]["message"]) == (503, True)


def test_an_engine_that_dies(llm: eyas.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in decoding fails what is in flight with an error, not with silence; then nothing is
    taken, and the server ends."""
    with running(llm, rows=2) as server:
        engine = server.service.engine

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a fault of ours")

        monkeypatch.setattr(engine, "_deliver", broken)
        with pytest.raises(openai.InternalServerError, match="engine has failed"):
            server.client(max_retries=3).completions.create(model="tiny", prompt="x", max_tokens=4)
        assert isinstance(engine.error, ZeroDivisionError)
        with pytest.raises(eyas.serve.errors.ApiError) as caught:
            engine.check_open()
        assert caught.value.status == 503
