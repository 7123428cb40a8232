"""POST /v1/corpora: texts that later requests of the same key are drafted from (`eyas serve --recall`)."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from eyas.serve.auth import owner_of
from eyas.serve.errors import ApiError
from eyas.serve.limits import check_ids
from eyas.serve.protocol.tokens import CorpusBody
from eyas.serve.service import Service

__all__ = ["add_corpus"]


async def add_corpus(service: Service, request: Request, body: CorpusBody) -> Response:
    """Add texts, or token ids, to the memory of the request's owner."""
    service.model_name(body.model)
    if service.pools is None:
        raise ApiError(400, "this server remembers no texts: start it with --recall MIB")
    texts = (
        [body.input] if isinstance(body.input, str) or (body.input and isinstance(body.input[0], int)) else body.input
    )
    counts = [await service.in_worker(_add, service, owner_of(request.headers), text) for text in texts]
    return JSONResponse({"object": "corpus", "texts": len(counts), "tokens": sum(counts)})


def _add(service: Service, owner: str, text: str | list[int]) -> int:
    """Return the number of tokens."""
    assert service.pools is not None
    if isinstance(text, str):
        tokens = service.encode(text, special=False)
    else:
        check_ids(text, service.llm.target.vocab_size, "input")
        tokens = tuple(text)
    service.pools[owner].add(tokens)
    return len(tokens)
