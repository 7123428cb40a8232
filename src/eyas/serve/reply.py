"""From the stream of a job to what a client reads: one response, or chunks. Each dialect says how a
choice looks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from eyas.serve.answers import Answer, Silence
from eyas.serve.auth import owner_of
from eyas.serve.protocol.fields import GenerationBody, StreamOptions
from eyas.serve.records import CycleSums, Delta, Job, Totals
from eyas.serve.service import Service
from eyas.serve.stream import KEEP_ALIVE, EventStream, event, json_response, unless_gone

__all__ = ["Dialect", "reply", "usage_of", "whole"]


@dataclass
class Dialect(ABC):
    """The wording of one endpoint's response."""

    job: Job
    model: str
    identity: str  # the request's id
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    prefix = ""  # prefix of the response's id
    object = ""
    chunk_object = ""

    @abstractmethod
    def choice(self, index: int, totals: Totals) -> dict[str, Any]: ...

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices that a Delta adds, each for a chunk of its own; none while there is nothing to be seen."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the choices of chunks that come before anything is generated."""
        return []

    def reasoning_tokens(self) -> int:
        return 0

    def extra(self, totals: list[Totals]) -> dict[str, Any]:
        """Return further fields of the whole response."""
        return {}

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields that a response and a chunk have in common."""
        head = {"id": f"{self.prefix}-{self.identity}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


async def reply(service: Service, request: Request, body: GenerationBody, dialect: Dialect) -> Response:
    """Submit the dialect's job and answer with what comes of it."""
    answer = await service.submit(dialect.job, owner_of(request.headers))
    if body.stream:
        events = _chunks(dialect, answer, body, service.settings.keep_alive)
        return EventStream(events, answer.close, headers=body.response_headers)
    totals = await whole(request, answer)
    response = dialect.envelope(dialect.object, [dialect.choice(i, t) for i, t in enumerate(totals)])
    content = {**response, **dialect.extra(totals), **_figures(dialect, totals)}
    if body.timings_per_token:
        content["timings"] = _timings(dialect.job, totals)
    return json_response(content, body.response_headers)


async def whole(request: Request, answer: Answer) -> list[Totals]:
    """Return the sequences of a job, once all have ended. Closes the Answer."""
    try:
        return await unless_gone(request, _collect(answer))
    finally:
        answer.close()


async def _collect(answer: Answer) -> list[Totals]:
    totals = [Totals() for _ in range(answer.count)]
    async for delta in answer.deltas():
        assert isinstance(delta, Delta)
        totals[delta.index].add(delta)
    return totals


async def _chunks(dialect: Dialect, answer: Answer, body: GenerationBody, keep_alive: float) -> AsyncIterator[bytes]:
    """Yield the events of a streamed response, but for the one that ends it."""
    options = body.stream_options or StreamOptions()
    totals = [Totals() for _ in range(answer.count)]

    def chunk(choice: dict[str, Any], cycle: Mapping[str, Any] | None = None) -> bytes:
        made = dialect.envelope(dialect.chunk_object, [choice])
        if options.continuous_usage_stats:
            made["usage"] = usage_of(dialect.job, totals, dialect.reasoning_tokens())
        elif options.include_usage:
            made["usage"] = None
        if body.timings_per_token:
            made["timings"] = _timings(dialect.job, totals)
        if cycle is not None:
            made["eyas"] = {"cycle": cycle}
        return event(made)

    for choice in dialect.opening():
        yield chunk(choice)
    async for delta in answer.deltas(keep_alive):
        if isinstance(delta, Silence):
            made = [KEEP_ALIVE]
        else:
            totals[delta.index].add(delta)
            choices = enumerate(dialect.chunk_choices(delta))
            made = [chunk(choice, delta.cycle if number == 0 else None) for number, choice in choices]
        for each in made:
            yield each
        if made:
            answer.written()
    if options.include_usage:
        yield event({**dialect.envelope(dialect.chunk_object, []), **_figures(dialect, totals)})


def usage_of(job: Job, totals: list[Totals], reasoning_tokens: int) -> dict[str, Any]:
    """Return token counts, as OpenAI reports them. A prompt counts once, however many samples it has."""
    prompt, completion = sum(map(len, job.prompts)), sum(len(t.token_ids) for t in totals)
    prediction = job.keywords.get("prediction") or ()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(t.cached_tokens for t in totals[:: job.n])},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": sum(t.predicted for t in totals),
            "rejected_prediction_tokens": sum(max(0, len(prediction) - t.predicted) for t in totals),
        },
    }


def _figures(dialect: Dialect, totals: list[Totals]) -> dict[str, Any]:
    """Return usage, and acceptance where there is a single sequence."""
    drafts = totals[0].speculation() if len(totals) == 1 else None
    usage = usage_of(dialect.job, totals, dialect.reasoning_tokens())
    return {"usage": usage, "metrics": {"speculative_decoding": drafts}}


def _timings(job: Job, totals: list[Totals]) -> dict[str, Any]:
    """Return counts and times under llama.cpp's names, without the prompt's own pass."""
    sums = CycleSums.from_cycles([cycle for each in totals for cycle in each.cycles])
    cached = sum(each.cached_tokens for each in totals[:: job.n])
    milliseconds = 1000 * sums.seconds
    return {
        "cache_n": cached,
        "prompt_n": sum(map(len, job.prompts)) - cached,
        "predicted_n": sum(len(each.token_ids) for each in totals),
        "predicted_ms": milliseconds,
        "predicted_per_token_ms": milliseconds / sums.emitted if sums.emitted else None,
        "predicted_per_second": sums.emitted / sums.seconds if sums.emitted else None,
        "draft_n": sums.drafted,
        "draft_n_accepted": sums.accepted,
    }
