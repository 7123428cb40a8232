"""Endpoints that describe the server: models, health, version, counters, the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from eyas import __version__
from eyas.serve.errors import ApiError
from eyas.serve.service import Service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["router"]

Answer = TypeVar("Answer", bound=Callable[..., Any])
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    listed = _listed_models(service)

    def get(path: str) -> Callable[[Answer], Answer]:
        """Serve a path to GET, and to HEAD, by which probes ask."""

        def add(answer: Answer) -> Answer:
            routes.head(path, include_in_schema=False)(answer)
            return routes.get(path)(answer)

        return add

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [listed[name] for name in service.models]}

    @get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
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
    async def stats() -> dict[str, Any]:
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


def _listed_models(service: Service) -> dict[str, dict[str, Any]]:
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


def _describe(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    if tokenizer is None:
        raise ApiError(404, "this server has no tokenizer")
    special = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        **special,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
