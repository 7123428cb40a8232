"""POST /v1/chat/completions: a conversation, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from eyas.core.requests import TokenLogprobs
from eyas.serve.access import request_id
from eyas.serve.limits import answer_tokens, check_count
from eyas.serve.logprobs import TokenTexts
from eyas.serve.protocol.chat import ChatBody, Prediction
from eyas.serve.records import Delta, Job, Totals
from eyas.serve.reply import Dialect, reply
from eyas.serve.service import Service

__all__ = ["chat"]


async def chat(service: Service, request: Request, body: ChatBody) -> Response:
    """Answer one request."""
    service.check_model(body.model)
    n = body.n or 1
    check_count(service.settings, 1, n)
    ids = await service.in_worker(service.render, body.messages)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    count = (body.top_logprobs or 0) if body.logprobs else None
    keywords = body.keywords(max_new_tokens=answer_tokens(service.settings, len(ids), asked, service.settings.max_tokens))
    prediction = await service.in_worker(predicted_tokens, service, body.prediction)
    job = Job((ids,), keywords, n, prediction=prediction, logprobs=count, **body.job_fields())
    dialect = ChatCompletion(job, service.settings.name, request_id(request.scope), service.token_texts, count)
    return await reply(service, request, body, dialect)


def predicted_tokens(service: Service, prediction: Prediction | None) -> tuple[int, ...]:
    """OpenAI's predicted output as token ids."""
    text = prediction.text if prediction else ""
    return service.encode(text, special=False) if text else ()


@dataclass
class ChatCompletion(Dialect):
    """OpenAI's chat completions."""

    texts: TokenTexts
    logprobs: int | None = None  # most probable tokens to list; None: no log-probabilities

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [_chunk_choice(i, {"role": "assistant", "content": ""}) for i in range(self.job.n)]

    def choice(self, index: int, totals: Totals) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": totals.text, "refusal": None},
            "logprobs": self._logprobs(totals.logprobs),
            "finish_reason": totals.finish,
            "stop_reason": totals.stop_reason,
        }

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = self._logprobs(delta.logprobs)
        choices = []
        if delta.text or logprobs or (delta.cycle and not delta.finish):
            choices.append({**_chunk_choice(delta.index, {"content": delta.text}), "logprobs": logprobs})
        if delta.finish:
            choices.append({**_chunk_choice(delta.index, {}, delta.finish), "stop_reason": delta.stop_reason})
        return choices

    def extra(self, totals: list[Totals]) -> dict[str, Any]:
        first = totals[0].prompt_logprobs
        return {"prompt_logprobs": self.texts.prompt(first)} if first else {}

    def _logprobs(self, values: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self.logprobs is None or not values else self.texts.chat(values, self.logprobs)


def _chunk_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
