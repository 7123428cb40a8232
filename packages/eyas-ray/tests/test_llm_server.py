"""The class for `ray.serve.llm`: requests and answers go through the server's own application. Ray itself is not
needed here; tests/interop has the class behind Ray's ingress."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

import itertools

from pydantic import BaseModel, ConfigDict

from eyas_ray import serving
from eyas_ray.llm_server import LLMServer, asked, events, options_of

MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def request(**fields: Any) -> Anything:
    """Return a request, as Ray's ingress has made it."""
    return Anything.model_validate(fields)


def config(**engine: Any) -> Any:
    """Return what the class reads of a LLMConfig."""
    loading = SimpleNamespace(model_id="small", model_source="embedded")
    return SimpleNamespace(
        model_loading_config=loading, engine_kwargs=engine, deployment_config={"num_replicas": 2},
        placement_group_config=None, runtime_env=None,
    )  # fmt: skip


@pytest.fixture
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the classes of answers, which take any field."""
    names = MODELS.split(".")
    modules = [ModuleType(".".join(names[: n + 1])) for n in range(len(names))]
    for parent, child in itertools.pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    for name in ("ChatCompletionResponse", "CompletionResponse", "TokenizeResponse", "ErrorResponse", "ErrorInfo"):
        setattr(modules[-1], name, type(name, (Anything,), {}))
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)


async def every(answers: Any) -> list[Any]:
    return [answer async for answer in answers]


@pytest.mark.slow
@pytest.mark.usefixtures("_models")
def test_answers_are_those_of_the_server() -> None:
    """Guards a chat, a stream, a completion, tokens, and a refusal with its status."""
    messages = [{"role": "user", "content": "Hello"}]

    async def use() -> list[list[Any]]:
        server = serving.EyasLLMServer.__new__(serving.EyasLLMServer)
        await server.__init__(config(method="suffix", rows=2))  # Ray calls it in the replica's event loop
        await server.check_health()
        chat = request(model="small", messages=messages, max_tokens=4, temperature=0)
        info = SimpleNamespace(headers={"X-Session-Id": "a", "Content-Length": "9"})
        answers = [
            await every(await server.chat(chat, info)),
            await every(await server.chat(chat.model_copy(update={"stream": True}))),
            await every(await server.completions(request(model="small", prompt="Once", max_tokens=3, temperature=0))),
            await every(await server.tokenize(request(prompt="Once"))),
            await every(await server.chat(chat.model_copy(update={"temperature": -1}))),
        ]
        await server._running.__aexit__(None, None, None)
        return answers

    (chat,), stream, (completion,), (tokens,), (error,) = asyncio.run(use())
    said = chat.choices[0]["message"]["content"]
    assert said
    assert chat.model == "small"
    parts = [json.loads(event.removeprefix("data: ")) for event in stream if "[DONE]" not in event]
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]) == said
    assert all(event.startswith("data: ") and event.endswith("\n\n") for event in stream)
    assert completion.usage["completion_tokens"] == 3
    assert tokens.count == len(tokens.tokens) > 0
    assert error.error.code == 400
    assert "temperature" in error.error.message


def test_options_and_resources() -> None:
    """Guards what a LLMConfig means for `eyas serve`, and what Ray reserves for a replica."""
    made = config(draft="HEAD", rows=4)
    assert options_of(made) == {"target": "embedded", "name": "small", "draft": "HEAD", "rows": 4}
    assert LLMServer.get_deployment_options(made) == {
        "num_replicas": 2, "ray_actor_options": {}, "placement_group_bundles": [{"CPU": 1, "GPU": 0}],
        "placement_group_strategy": "STRICT_PACK",
    }  # fmt: skip


def test_a_client_that_goes_is_noticed() -> None:
    """Bug guarded: a stream that nobody reads any more would be written to its end."""
    seen: list[str] = []

    async def app(_: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"data: 1\n\nda", "more_body": True})
        seen.append((await receive())["type"])

    async def use() -> None:
        answer = asked(app, "/", {}, {})
        assert (await anext(answer))["status"] == 200
        await answer.aclose()

    asyncio.run(use())
    assert seen == ["http.disconnect"]


def test_events_are_whole() -> None:
    """Guards events that come in pieces, or several in one."""

    async def pieces() -> Any:
        for body in (b"data: 1\n\nda", b"ta: 2\n\n", b"data: 3\n\ndata: [DONE]\n\n"):
            yield {"body": body}

    assert asyncio.run(every(events(pieces()))) == ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n", "data: [DONE]\n\n"]
