"""Endpoints that generate nothing: models, health, version and counters. vLLM's /tokenize and /detokenize,
which lm-eval finds. The route /v1/corpora takes texts that later requests of the same key are drafted from
(`eyas serve --recall`). The route /v1/draft replaces the head by another one of the same method and sizes, from
the next cycle on.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from eyas import __version__
from eyas.errors import CheckpointError
from eyas.serve.auth import given_key, owner_of
from eyas.serve.chat import TemplateFields, prompt_of
from eyas.serve.errors import ApiError, JsonObject, bad_request
from eyas.serve.fields import Body
from eyas.serve.records import check_ids
from eyas.serve.service import Service
from eyas.serve.tools import tools_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = TypeVar("Answer", bound=Callable[..., Any])
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def router(service: Service) -> APIRouter:
    """Return the routes that do not generate: models, health, metrics, tokens, corpora, the draft head."""
    routes = APIRouter()
    listed = _listed_models(service)

    def get(path: str) -> Callable[[Answer], Answer]:
        """Serve a path to GET, and to HEAD, by which probes ask."""

        def add(answer: Answer) -> Answer:
            routes.head(path, include_in_schema=False)(answer)
            return routes.get(path)(answer)

        return add

    @get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [listed[name] for name in service.models]}

    @get("/v1/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        return listed[service.model_name(name)]

    @get("/health")
    async def health() -> Response:
        service.engine.check_open()
        return Response(status_code=200)

    @get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=PROMETHEUS)

    @get("/stats")
    async def stats() -> JsonObject:
        running, waiting = service.engine.load
        return {
            "model": service.settings.name,
            "method": service.llm.method,
            "methods": service.engine.methods.names,
            "rows": service.settings.rows,
            "running": running,
            "waiting": waiting,
            "queue": service.settings.queue,
            "draining": service.engine.draining,
            "recent": service.metrics.recent.summary(),
            "learnt": None if service.heads is None else service.heads.figures(),
        }

    @get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return JSONResponse(_describe(service.llm.tokenizer))

    return routes


def _listed_models(service: Service) -> dict[str, JsonObject]:
    """Return OpenAI's object of each model, by name: the target with each adapter, and the target itself."""
    name = service.settings.name
    common = {
        "object": "model",
        "created": int(time.time()),
        "owned_by": "eyas",
        "max_model_len": service.settings.max_model_len,
    }
    models = {adapter: {**common, "root": adapter, "parent": name} for adapter in service.llm.adapters}
    models[name] = {**common, "root": service.llm.target.name or name, "parent": None}
    return {model: {"id": model, **fields} for model, fields in models.items()}


def _describe(tokenizer: PreTrainedTokenizerBase | None) -> JsonObject:
    if tokenizer is None:
        raise ApiError(404, "this server has no tokenizer")
    special = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        **special,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }


class TokenizeBody(TemplateFields):
    """A text, or a conversation with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class CorpusBody(Body):
    """One text or several, as strings or as token ids."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]]


class DraftBody(Body):
    """A head: a folder of the server's machine, or a name."""

    path: str | None = None
    name: str | None = None


async def tokenize(service: Service, request: Request, body: TokenizeBody) -> Response:
    """Answer POST /tokenize."""
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either a prompt or messages", "prompt")
    tokens = await service.in_worker(_tokens, service, body)
    strings = service.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    content = {
        "count": len(tokens),
        "max_model_len": service.settings.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }
    return JSONResponse(content, headers=body.response_headers)


async def detokenize(service: Service, request: Request, body: DetokenizeBody) -> Response:
    """Answer POST /detokenize."""
    service.model_name(body.model)
    return JSONResponse({"prompt": await service.in_worker(service.decode, body.tokens)})


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        return list(prompt_of(service, body.messages, body, tools).ids)
    assert body.prompt is not None
    return list(service.encode(body.prompt, body.add_special_tokens is not False)) if body.prompt else []


async def add_corpus(service: Service, request: Request, body: CorpusBody) -> Response:
    """Answer POST /v1/corpora: keep texts to draft from."""
    service.model_name(body.model)
    if service.pools is None:
        raise bad_request("this server remembers no texts: start it with --recall MIB")
    is_one = isinstance(body.input, str) or (body.input and isinstance(body.input[0], int))
    texts = [body.input] if is_one else body.input
    counts = [await service.in_worker(_add, service, owner_of(request.headers), text) for text in texts]
    return JSONResponse({"object": "corpus", "texts": len(counts), "tokens": sum(counts)})


def _add(service: Service, owner: str, text: str | list[int]) -> int:
    assert service.pools is not None
    if isinstance(text, str):
        tokens = service.encode(text, special=False)
    else:
        check_ids(text, service.llm.target.vocab_size, "input")
        tokens = tuple(text)
    service.pools[owner].add(tokens)
    return len(tokens)


GIVEN = "given"  # the name of the head that the server began with


async def replace_draft(service: Service, request: Request, body: DraftBody) -> Response:
    """Answer POST /v1/draft: replace the draft head while requests run. Needs the admin key."""
    _check_admin(service, request)
    if service.heads is None:
        raise bad_request("the head of this server cannot be replaced: that needs the package eyas-train")
    source = _source(service.heads, body)
    service.engine.check_open()
    try:
        await change_head(service, source)
    except CheckpointError as error:
        raise ApiError(
            409, str(error), param="name" if body.path is None else "path", code="head_does_not_fit"
        ) from error
    return JSONResponse({"object": "draft", "head": source, "method": service.llm.method})


async def change_head(service: Service, source: str) -> None:
    """Load a head and let it draft between two cycles. Raise CheckpointError if it does not fit."""
    heads = service.heads
    assert heads is not None, "the head of this server can be replaced"
    head = await service.in_worker(heads.load, source)
    done = service.engine.between_cycles(lambda: heads.put(head, source))
    await asyncio.wait_for(asyncio.wrap_future(done), service.settings.timeout)


def _check_admin(service: Service, request: Request) -> None:
    if service.settings.admin_key is None:
        raise ApiError(403, "this server has no key for its admin: start it with --admin-key KEY")
    given = (given_key(request.headers) or "").encode("utf-8", "surrogatepass")
    if not hmac.compare_digest(given, service.settings.admin_key.encode("utf-8", "surrogatepass")):
        raise ApiError(403, "this needs the key of the server's admin", code="not_admin")


def _source(heads: Any, body: DraftBody) -> str:
    if (body.path is None) == (body.name is None):
        raise bad_request('give either "path", a folder of this machine, or "name", a hub id or "given"')
    if body.path is not None:
        folder = os.path.expanduser(body.path)  # unlike pathlib's, it takes any text
        if not os.path.isdir(folder):
            raise bad_request(f"{body.path[:200]}: there is no such folder on the server's machine", "path")
        return folder
    if body.name != GIVEN:
        return str(body.name)
    if heads.given is None:
        raise bad_request("this server began without a head", "name")
    return str(heads.given)
