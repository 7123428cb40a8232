"""From the stream of a job to the client's form: one response, or events. Each dialect says how they look.

Choices       chunks of completions and chats, for several sequences
BlockWriter   one sequence as blocks: reasoning, text and calls, by typed events (/v1/responses, /v1/messages)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from eyas.serve.answers import Answer
from eyas.serve.auth import owner_of
from eyas.serve.errors import ApiError, JsonObject, error_of
from eyas.serve.fields import GenerationBody, StreamOptions
from eyas.serve.reading import Reader
from eyas.serve.records import CycleSums, Delta, Job, Totals
from eyas.serve.service import Service

T = TypeVar("T")
Events = Iterable[bytes]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies are to hand every event on at once
log = logging.getLogger(__name__)


class Dialect(ABC):
    """The wording of one endpoint's response."""

    job: Job
    last = b""  # sent after the events of a stream

    @abstractmethod
    def begun(self) -> Events:
        """Return the events that come before anything is generated."""

    @abstractmethod
    def add(self, delta: Delta) -> Events:
        """Return the events of the next part; none while there is nothing to be seen."""

    @abstractmethod
    def ended(self) -> Events:
        """Return the events of the end; the answer is whole."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error in the middle of a stream."""

    @abstractmethod
    def response(self, totals: list[Totals]) -> JsonObject:
        """Return the whole response to a request without a stream."""


async def reply(
    service: Service, request: Request, dialect: Dialect, stream: bool, headers: Mapping[str, str]
) -> Response:
    """Submit the dialect's job and answer with its result."""
    answer = await service.submit(dialect.job, owner_of(request.headers))
    if stream:
        return EventStream(dialect, answer, service.settings.keep_alive, headers)
    try:
        totals = await unless_gone(request, _collect(answer))
    finally:
        answer.close()
    # it may hold what the client sent, so it must not fail at any value
    return Response(written(dialect.response(totals)), headers=dict(headers), media_type="application/json")


async def _collect(answer: Answer) -> list[Totals]:
    totals = [Totals() for _ in range(answer.count)]
    async for delta in answer.deltas():
        assert delta is not None, "silence is for streams"
        totals[delta.index].add(delta)
    return totals


async def events_of(dialect: Dialect, answer: Answer, keep_alive: float) -> AsyncIterator[bytes]:
    """Yield the events of a streamed response, and comments in silence."""
    for event in dialect.begun():
        yield event
    async for delta in answer.deltas(keep_alive):
        made = [KEEP_ALIVE] if delta is None else list(dialect.add(delta))
        for event in made:
            yield event
        if made:
            answer.written()
    for event in dialect.ended():
        yield event


def usage_of(job: Job, totals: list[Totals], reasoning_tokens: int) -> JsonObject:
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


# --- choices ---


@dataclass
class Choices(Dialect):
    """Completions and chats: objects with a list of choices."""

    job: Job
    model: str
    identity: str  # the request's id
    body: GenerationBody
    created: int = field(init=False, default_factory=lambda: int(time.time()))
    totals: list[Totals] = field(init=False)

    prefix = ""  # prefix of the response's id
    object = ""
    chunk_object = ""
    last = DONE

    def __post_init__(self) -> None:
        self.totals = [Totals() for _ in range(len(self.job.prompts) * self.job.n)]

    @abstractmethod
    def choice(self, index: int, totals: Totals) -> JsonObject:
        """Return one finished choice."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[JsonObject]:
        """Return the choices that a Delta adds, each for a chunk of its own; none while there is nothing to be seen."""

    def reasoning_tokens(self) -> int:
        """Return the number of tokens that count as reasoning."""
        return 0

    def extra(self, totals: list[Totals]) -> JsonObject:
        """Return further fields of the whole response."""
        return {}

    def envelope(self, kind: str, choices: list[JsonObject]) -> JsonObject:
        """Return the fields that a response and a chunk have in common."""
        head = {"id": f"{self.prefix}-{self.identity}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    def response(self, totals: list[Totals]) -> JsonObject:
        response = self.envelope(self.object, [self.choice(i, t) for i, t in enumerate(totals)])
        timings = {"timings": _timings(self.job, totals)} if self.body.timings_per_token else {}
        return {**response, **self.extra(totals), **self._figures(totals), **timings}

    def begun(self) -> Events:
        return ()

    def add(self, delta: Delta) -> Iterator[bytes]:
        self.totals[delta.index].add(delta)
        for number, choice in enumerate(self.chunk_choices(delta)):
            yield self.chunk(choice, None if number else delta.cycle)

    def ended(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield event({**self.envelope(self.chunk_object, []), **self._figures(self.totals)})

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    @property
    def _options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def chunk(self, choice: JsonObject, cycle: Mapping[str, Any] | None = None) -> bytes:
        """Return a choice as an event of the stream, with usage, timings and cycle where they were asked for."""
        made = self.envelope(self.chunk_object, [choice])
        if self._options.continuous_usage_stats:
            made["usage"] = usage_of(self.job, self.totals, self.reasoning_tokens())
        elif self._options.include_usage:
            made["usage"] = None
        if self.body.timings_per_token:
            made["timings"] = _timings(self.job, self.totals)
        if cycle is not None:
            made["eyas"] = {"cycle": cycle}
        return event(made)

    def _figures(self, totals: list[Totals]) -> JsonObject:
        """Return usage, and acceptance where there is a single sequence."""
        drafts = totals[0].acceptance() if len(totals) == 1 else None
        usage = usage_of(self.job, totals, self.reasoning_tokens())
        return {"usage": usage, "metrics": {"speculative_decoding": drafts}}


def _timings(job: Job, totals: list[Totals]) -> JsonObject:
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


# --- blocks ---

Kind = Literal["reasoning", "text", "call"]
KINDS: Mapping[str, Kind] = {"reasoning_content": "reasoning", "content": "text"}  # from parts of a message


@dataclass
class Block:
    """A part of an answer that a client sees as one thing."""

    number: int
    kind: Kind
    text: str = ""  # the text so far; of a call its arguments, as JSON
    call_id: str = ""
    name: str = ""  # name of the function that is called


class BlockWriter(Dialect):
    """Writes the answer to one chat, whole or as typed events."""

    def __init__(self, job: Job, model: str, reader: Reader) -> None:
        self.job, self.model, self.reader = job, model, reader
        self.totals = Totals()
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @abstractmethod
    def opened(self, block: Block) -> Events:
        """Return the events of a block that begins; its text is still empty."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Events:
        """Return the events of a block that has got this text in addition."""

    @abstractmethod
    def closed(self, block: Block) -> Events:
        """Return the events of a block that is whole."""

    @abstractmethod
    def message(self) -> JsonObject:
        """Return the whole answer, once it has ended."""

    def arguments(self, text: str) -> str:
        """Return a call's arguments in the dialect's form: a text, which need not be an object of JSON."""
        return text

    @property
    def called(self) -> bool:
        """Whether the answer ended with calls of tools."""
        return self.reader.called and self.totals.finish == "stop"

    def add(self, delta: Delta) -> Iterator[bytes]:
        self.totals.add(delta)
        yield from self._read(delta)

    def response(self, totals: list[Totals]) -> JsonObject:
        (self.totals,) = totals
        list(self._read(self.totals.as_delta()))
        return self.message()

    def _read(self, delta: Delta) -> Iterator[bytes]:
        for part in self.reader.read(delta):
            for call in part.get("tool_calls", ()):
                function = call["function"]
                yield from self._begin("call", call["id"], function["name"])
                yield from self._grow(self.arguments(function["arguments"]))
            for name, kind in KINDS.items():
                if text := part.get(name):
                    if self._open is None or self._open.kind != kind:
                        yield from self._begin(kind)
                    yield from self._grow(text)
        if delta.finish is not None:
            if not self.blocks:
                yield from self._begin("text")
            yield from self._end()

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[bytes]:
        yield from self._end()
        self._open = Block(len(self.blocks), kind, call_id=call_id, name=name)
        self.blocks.append(self._open)
        yield from self.opened(self._open)

    def _grow(self, text: str) -> Iterator[bytes]:
        assert self._open is not None
        self._open.text += text
        yield from self.grown(self._open, text)

    def _end(self) -> Iterator[bytes]:
        if self._open is not None:
            yield from self.closed(self._open)
        self._open = None


# --- what is sent ---


def written(data: Any) -> bytes:
    """Return data as JSON. Half a surrogate pair becomes a question mark, for it has no bytes."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return an event of the stream: its name if it has one, and its data as JSON."""
    head = f"event: {name}\n" if name else ""
    return head.encode() + b"data: " + written(data) + b"\n\n"


class EventStream(Response):
    """A response of events. It ends early when the client hangs up. An error in the middle becomes an event."""

    media_type = "text/event-stream"

    def __init__(self, dialect: Dialect, answer: Answer, keep_alive: float, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self.dialect = dialect
        self.answer = answer
        self.keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first_of(self._send_all(send), _hung_up(receive))
        finally:
            self.answer.close()

    async def _send_all(self, send: Send) -> None:
        async def body(content: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for content in events_of(self.dialect, self.answer, self.keep_alive):
                await body(content)
        except Exception as error:
            answer = error_of(error)
            if answer is not error and answer.status == 500:
                log.exception("a stream has failed")
            await body(self.dialect.failed(answer))
        await body(self.dialect.last, more=False)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is given up when the client hangs up."""
    result = await _first_of(work, _hung_up(request.receive))
    if result is None:
        raise ApiError(499, "the client has gone")
    return result


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Coroutine[Any, Any, T], other: Coroutine[Any, Any, None]) -> T | None:
    """Return the result of `work`; None when `other` is done before it."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    return tasks[0].result() if not tasks[0].cancelled() else None
