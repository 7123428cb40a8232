"""The routes of a server, and the checks that come before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from eyas import __version__
from eyas.serve import chat, completions, errors, info, messages, responses, tokens
from eyas.serve.access import AccessLog
from eyas.serve.auth import KeyCheck
from eyas.serve.bodies import body_of
from eyas.serve.hosts import HostCheck
from eyas.serve.limits import BodyLimit
from eyas.serve.page.routes import router as page_router
from eyas.serve.protocol.chat import ChatBody
from eyas.serve.protocol.completions import CompletionBody
from eyas.serve.protocol.responses import ResponsesBody
from eyas.serve.protocol.tokens import DetokenizeBody, TokenizeBody
from eyas.serve.service import Service

__all__ = ["make_app"]


def make_app(
    service: Service, keys: Sequence[str] = (), origins: Sequence[str] = (), hosts: Sequence[str] = ()
) -> FastAPI:
    """The application.

    Args:
        keys: one of them is needed, if there are any.
        origins: origins of web pages that may use the server from a browser.
        hosts: names by which the server answers; (): any.
    """

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
        docs_url=None,  # their scripts would come from the network
        redoc_url=None,
        middleware=[
            Middleware(AccessLog),
            Middleware(HostCheck, names=hosts),
            *(
                [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])]
                if origins
                else []
            ),
            Middleware(KeyCheck, keys=keys),
            Middleware(BodyLimit, most=service.settings.max_body_bytes),
        ],
    )
    errors.install(app)
    app.include_router(info.router(service))
    _add_generation(app, service)
    app.include_router(messages.router(service))
    app.include_router(page_router)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    """The routes that read a body."""

    @app.post("/v1/completions", response_model=None)
    async def completions_route(
        request: Request, body: Annotated[CompletionBody, Depends(body_of(CompletionBody))]
    ) -> Response:
        return await completions.complete(service, request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_route(request: Request, body: Annotated[ChatBody, Depends(body_of(ChatBody))]) -> Response:
        return await chat.chat(service, request, body)

    @app.post("/v1/responses", response_model=None)
    async def responses_route(
        request: Request, body: Annotated[ResponsesBody, Depends(body_of(ResponsesBody))]
    ) -> Response:
        return await responses.respond(service, request, body)

    @app.post("/tokenize")
    async def tokenize_route(body: Annotated[TokenizeBody, Depends(body_of(TokenizeBody))]) -> dict[str, Any]:
        return await tokens.tokenize(service, body)

    @app.post("/detokenize")
    async def detokenize_route(body: Annotated[DetokenizeBody, Depends(body_of(DetokenizeBody))]) -> dict[str, Any]:
        return await tokens.detokenize(service, body)
