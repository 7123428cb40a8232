"""The routes of a server, and the checks that come before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from eyas import __version__
from eyas.serve import chat, completions, errors, info, messages, responses
from eyas.serve.auth import HostCheck, KeyCheck
from eyas.serve.fields import Body
from eyas.serve.http import AccessLog, BodyLimit, add_route
from eyas.serve.page.routes import router as page_router
from eyas.serve.service import Service

ROUTES: dict[str, tuple[type[Body], Callable[[Service, Request, Any], Awaitable[Response]]]] = {
    "/v1/completions": (completions.CompletionBody, completions.complete),
    "/v1/chat/completions": (chat.ChatBody, chat.chat),
    "/v1/responses": (responses.ResponsesBody, responses.respond),
    "/infill": (completions.InfillBody, completions.infill),
    "/v1/corpora": (info.CorpusBody, info.add_corpus),
    "/v1/draft": (info.DraftBody, info.replace_draft),
    "/tokenize": (info.TokenizeBody, info.tokenize),
    "/detokenize": (info.DetokenizeBody, info.detokenize),
    "/v1/messages": (messages.MessagesBody, messages.messages),
    "/v1/messages/count_tokens": (messages.CountBody, messages.count_tokens),
}


def make_app(
    service: Service,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    docs: bool = False,
) -> FastAPI:
    """Return the application, which needs one of the keys and answers by these host names, if there are any.
    `docs`: /docs shows FastAPI's page of the interface, whose scripts come from the network."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.stop()

    app = FastAPI(
        title="eyas",
        version=__version__,
        lifespan=lifespan,
        docs_url="/docs" if docs else None,
        redoc_url=None,
        middleware=[
            Middleware(AccessLog),
            Middleware(HostCheck, names=hosts),
            *(
                [
                    Middleware(
                        CORSMiddleware,
                        allow_origins=[origin.rstrip("/") for origin in origins],
                        allow_methods=["*"],
                        allow_headers=["*"],
                        allow_private_network=True,
                    )
                ]
                if origins
                else []
            ),
            Middleware(KeyCheck, keys=[*keys, *filter(None, [service.settings.admin_key])] if keys else ()),
            Middleware(BodyLimit, max_bytes=service.settings.max_body_bytes),
        ],
    )
    errors.install(app)
    app.include_router(info.router(service))
    for path, (kind, answer) in ROUTES.items():
        add_route(app.router, path, kind, partial(answer, service))
    app.include_router(page_router)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Let the description of the interface hold the bodies' schemas, each once."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        made = plain()
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        for operation in (one for operations in made["paths"].values() for one in operations.values()):
            content = operation.get("requestBody", {}).get("content", {})
            for described in content.values():
                schemas.update(described["schema"].pop("$defs", {}))
        return made

    app.openapi = openapi  # type: ignore[method-assign]
