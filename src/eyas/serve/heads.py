"""POST /v1/draft: another head of the same method and sizes drafts from the next cycle on. No request is dropped."""

from __future__ import annotations

import asyncio
import hmac
import os

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from eyas.errors import CheckpointError
from eyas.serve.auth import given_key
from eyas.serve.errors import ApiError
from eyas.serve.protocol.chat import DraftBody
from eyas.serve.service import Heads, Service

__all__ = ["GIVEN", "change_head", "replace_draft"]

GIVEN = "given"  # the name of the head that the server began with


async def replace_draft(service: Service, request: Request, body: DraftBody) -> Response:
    """Load a head, and let it draft between two cycles."""
    _check_admin(service, request)
    if service.heads is None:
        raise ApiError(400, "the head of this server cannot be replaced")
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


def _source(heads: Heads, body: DraftBody) -> str:
    if (body.path is None) == (body.name is None):
        raise ApiError(400, 'give either "path", a folder of this machine, or "name", a hub id or "given"')
    if body.path is not None:
        folder = os.path.expanduser(body.path)  # unlike pathlib's, it takes any text
        if not os.path.isdir(folder):
            raise ApiError(400, f"{body.path[:200]}: there is no such folder on the server's machine", param="path")
        return folder
    if body.name != GIVEN:
        return str(body.name)
    if heads.given is None:
        raise ApiError(400, "this server began without a head", param="name")
    return heads.given
