"""POST /v1/completions: text or token ids go on as they are, without a chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from eyas.serve.access import request_id
from eyas.serve.limits import answer_tokens, check_count
from eyas.serve.protocol.completions import CompletionBody
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Dialect, reply
from eyas.serve.service import Service, speculation

__all__ = ["complete"]

DEFAULT_TOKENS = 16  # as OpenAI's


async def complete(service: Service, request: Request, body: CompletionBody) -> Response:
    """Answer one request."""
    service.check_model(body.model)
    prompts, n = body.prompts(), body.n or 1
    check_count(service.settings, len(prompts), n)
    ids = await service.in_worker(lambda: tuple(service.encode(prompt) for prompt in prompts))
    method, keywords = speculation(body)
    longest = max(map(len, ids))
    keywords |= body.keywords() | {"max_new_tokens": answer_tokens(service.settings, longest, body.max_tokens, DEFAULT_TOKENS)}
    job = Job(ids, keywords, n, method, body.timeout)
    return await reply(service, request, body, Completion(job, service.settings.name, request_id(request.scope)))


@dataclass
class Completion(Dialect):
    """OpenAI's text completions."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, index: int, totals: Totals) -> dict[str, Any]:
        return _choice(index, totals.text, totals.finish, totals.stop_reason)

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        if not delta.text and not delta.finish:
            return []
        return [_choice(delta.index, delta.text, delta.finish, delta.stop_reason)]


def _choice(index: int, text: str, finish: str | None, stop_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": stop_reason}
