"""A server for tests of the page: it sends what a test wrote down, in place of a model's answers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from eyas.serve.page.routes import router

Cycle = dict[str, Any]
MODEL = "tiny <b>model</b>"


def node(
    parent: int, text: str, depth: int, q: float | None = 0.5, p: float = 0.5, accepted: bool = False
) -> dict[str, Any]:
    """A node of a tree as `eyas.serve.cycles` writes it."""
    return {"parent": parent, "token": 7, "text": text, "depth": depth, "q": q, "p": p, "accepted": accepted}


def prefill(text: str) -> Cycle:
    """The object of a prompt's forward."""
    head = {"number": 0, "prefill": True, "tokens": [{"token": 1, "text": text, "node": None}]}
    return {**head, "nodes": [], "path": [], "bonus": None, "bonus_text": "", "ended": "", **_figures("fixed", 0.0)}


def cycle(
    number: int, root: str, drafted: Sequence[str], own: str, refused: Sequence[str] = (), plan: str = "16/5/4"
) -> Cycle:
    """A cycle that accepted the chain `drafted`. The draft also offered `refused` after the last of them."""
    nodes = [node(-1, root, 0, None, 1.0, True)]
    nodes += [node(depth - 1, text, depth, 0.9, 0.8, True) for depth, text in enumerate(drafted, 1)]
    nodes += [node(len(drafted), text, len(drafted) + 1, 0.25, 0.125) for text in refused]
    tokens = [{"token": 7, "text": text, "node": depth} for depth, text in enumerate(drafted, 1)]
    return {
        "number": number,
        "prefill": False,
        "tokens": [*tokens, {"token": 8, "text": own, "node": None}],
        "nodes": nodes,
        "path": list(range(len(drafted) + 1)),
        "bonus": 8,
        "bonus_text": own,
        "ended": "other token" if refused else "no child",
        **_figures(plan, 2.5),
    }


def _figures(plan: str, tau: float) -> Cycle:
    return {"ms": 12.34, "parts_ms": {"draft": 2.0, "target": 9.0}, "plan": plan, "tau_so_far": tau}


def text_of(made: Cycle) -> str:
    """The text that a cycle adds."""
    return "".join(token["text"] for token in made["tokens"])


@dataclass
class Script:
    """The server's answers, and the requests that it got."""

    # one list for each request; the last one serves the rest
    turns: list[list[Cycle | dict[str, Any]]] = field(default_factory=list)
    endless: bool = False  # after a turn's cycles words come, until the client hangs up
    refusal: tuple[int, str] | None = None  # status and message of every request
    key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    stats: dict[str, Any] = field(default_factory=dict)


def application(script: Script) -> FastAPI:
    """The routes that the page uses."""
    app = FastAPI()
    app.include_router(router)

    def refused(request: Request) -> Response | None:
        if script.key and request.headers.get("authorization") != f"Bearer {script.key}":
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        if script.refusal:
            return JSONResponse({"error": {"message": script.refusal[1]}}, script.refusal[0])
        return None

    @app.get("/stats", response_model=None)
    async def stats(request: Request) -> Response:
        return refused(request) or JSONResponse({"model": MODEL, "methods": ["eagle3", "suffix"], **script.stats})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        body = await request.json()
        script.bodies.append(body)
        turn = script.turns[min(len(script.bodies), len(script.turns)) - 1] if script.turns else []
        return refused(request) or StreamingResponse(_events(script, turn), media_type="text/event-stream")

    return app


async def _events(script: Script, turn: Sequence[dict[str, Any]]) -> AsyncIterator[str]:
    yield ": keep-alive\n\n"
    try:
        for item in turn:
            yield _event(item if "tokens" not in item else chunk(text_of(item), item))
        while script.endless:
            yield _event(chunk(" word", None))
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        script.hung_up.set()
        raise
    yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield "data: [DONE]\n\n"


def chunk(text: str, made: Cycle | None) -> dict[str, Any]:
    """A chunk of a stream; its text need not be that of its cycle."""
    one: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return one if made is None else {**one, "eyas": {"cycle": made}}


def _event(item: dict[str, Any]) -> str:
    return f"data: {json.dumps(item)}\n\n"


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve an application on a free port of this machine; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
