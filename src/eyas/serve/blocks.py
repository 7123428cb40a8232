"""Answers that are a sequence of blocks: reasoning, text and calls. /v1/responses and /v1/messages
write them, whole or as typed events, each dialect in its own words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request, Response

from eyas.serve.answers import Answer, Silence
from eyas.serve.auth import owner_of
from eyas.serve.chat import Chat
from eyas.serve.errors import ApiError
from eyas.serve.records import Delta, Totals
from eyas.serve.reply import whole
from eyas.serve.service import Service
from eyas.serve.stream import KEEP_ALIVE, EventStream, json_response

__all__ = ["Block", "BlockWriter", "reply_in_blocks"]

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


class BlockWriter(ABC):
    """Writes the answer to one chat in a dialect. The methods without a body give the dialect's events."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.totals = Totals()
        self.blocks: list[Block] = []
        self.reader = chat.new_reader()
        self._open: Block | None = None

    @abstractmethod
    def begun(self) -> Iterable[bytes]:
        """Return the events that come before anything is generated."""

    @abstractmethod
    def opened(self, block: Block) -> Iterable[bytes]:
        """Return the events of a block that begins; its text is still empty."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Iterable[bytes]:
        """Return the events of a block that has got this text in addition."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[bytes]:
        """Return the events of a block that is whole."""

    @abstractmethod
    def ended(self) -> Iterable[bytes]:
        """Return the events of the end; the answer is whole."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error in the middle of a stream."""

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """Return the whole answer, once it has ended."""

    def arguments(self, text: str) -> str:
        """Return a call's arguments in the dialect's form: a text, which need not be an object of JSON."""
        return text

    @property
    def called(self) -> bool:
        """Whether the answer ends because the model called a function."""
        return self.reader.called and self.totals.finish == "stop"

    def add(self, delta: Delta) -> Iterator[bytes]:
        """Yield the events of what came next."""
        self.totals.add(delta)
        yield from self._read(delta)

    def set(self, totals: Totals) -> None:
        """Read a whole answer at once."""
        self.totals = totals
        finish = totals.finish or "length"
        list(self._read(Delta(0, totals.text, tuple(totals.token_ids), finish, totals.stop_reason)))

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


async def reply_in_blocks(
    service: Service, request: Request, writer: BlockWriter, stream: bool, headers: Mapping[str, str]
) -> Response:
    """Submit the writer's chat and answer with what comes of it."""
    answer = await service.submit(writer.chat.job, owner_of(request.headers))
    if stream:
        events = _events(writer, answer, service.settings.keep_alive)
        return EventStream(events, answer.close, b"", headers, writer.failed)
    (totals,) = await whole(request, answer)
    writer.set(totals)
    return json_response(writer.response(), headers)


async def _events(writer: BlockWriter, answer: Answer, keep_alive: float) -> AsyncIterator[bytes]:
    for event in writer.begun():
        yield event
    async for delta in answer.deltas(keep_alive):
        made = [KEEP_ALIVE] if isinstance(delta, Silence) else list(writer.add(delta))
        for event in made:
            yield event
        if made:
            answer.written()
    for event in writer.ended():
        yield event
