"""POST /tokenize and /detokenize, as in vLLM: lm-eval finds them by itself. POST /v1/corpora: texts that later requests
of the same key are drafted from (`eyas serve --recall`)."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from eyas.serve.auth import owner_of
from eyas.serve.chat import prompt_of
from eyas.serve.errors import ApiError
from eyas.serve.limits import check_ids
from eyas.serve.protocol.chat import CorpusBody, DetokenizeBody, TokenizeBody
from eyas.serve.service import Service
from eyas.serve.tools import tools_of

__all__ = ["add_corpus", "detokenize", "tokenize"]


async def tokenize(service: Service, request: Request, body: TokenizeBody) -> Response:
    """Return the token ids of a text, or of a conversation as /v1/chat/completions reads it."""
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either a prompt or messages", param="prompt")
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
    """Return the text of token ids, special tokens included."""
    service.model_name(body.model)
    return JSONResponse({"prompt": await service.in_worker(service.decode, body.tokens)})


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        return list(prompt_of(service, body.messages, body, tools).ids)
    assert body.prompt is not None
    return list(service.encode(body.prompt, body.add_special_tokens is not False)) if body.prompt else []


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
    assert service.pools is not None
    if isinstance(text, str):
        tokens = service.encode(text, special=False)
    else:
        check_ids(text, service.llm.target.vocab_size, "input")
        tokens = tuple(text)
    service.pools[owner].add(tokens)
    return len(tokens)
