"""Answers: results, streams with one `Piece` per cycle, figures, and how tokens become text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from eyas.core.engine import Decoder, Request, Step
from eyas.core.totals import StepTotals, tau, tokens_per_second
from eyas.errors import EyasError, InputError
from eyas.text import StopStrings

if TYPE_CHECKING:
    from eyas.core.logprobs import TokenLogprobs

SHOWN = 60  # characters of a text that a repr shows


@dataclass(frozen=True)
class Stats:
    """Figures of one answer."""

    cycles: int  # forwards of the target after the prompt's own
    accepted_lengths: tuple[int, ...]  # draft tokens that each cycle emitted, without the bonus token
    seconds: float  # time from the prompt to the last token
    prefill_seconds: float  # the part of `seconds` for the prompt's forward and the first token
    slow_processors: tuple[str, ...] = ()  # logits processors, which run once per node

    tokens: int = 0  # emitted by cycles; the first token, which comes from the prompt's forward, is not counted
    decisions: Mapping[str, int] = field(default_factory=dict)  # cycles by what was drafted: `Step.drafted_by`
    predicted_tokens: int = 0  # accepted draft tokens that `prediction` proposed
    cached_tokens: int = 0  # prompt tokens whose keys and values were in the cache already

    @classmethod
    def from_totals(cls, totals: StepTotals, request: Request) -> Stats:
        """Return the figures of a request that has ended."""
        return cls(
            cycles=totals.cycles,
            accepted_lengths=tuple(totals.accepted_lengths),
            seconds=totals.seconds,
            prefill_seconds=totals.prefill_seconds,
            slow_processors=tuple(name for feature in request.features for name in feature.runs_per_node),
            tokens=totals.emitted,
            decisions=dict(totals.decisions),
            predicted_tokens=totals.predicted_tokens,
            cached_tokens=totals.cached_tokens,
        )

    @property
    def tau(self) -> float:
        """Tokens emitted per cycle, the bonus token included; 0 without cycles."""
        return tau(self.tokens, self.cycles)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted by cycles per second after the prefill; 0 without cycles."""
        return tokens_per_second(self.tokens, self.seconds - self.prefill_seconds)


@dataclass(frozen=True, repr=False)
class Result:
    """An answer."""

    text: str  # without special tokens and without the stop string
    token_ids: tuple[int, ...]  # the new tokens up to the one that ended the text, an EOS included
    finish_reason: str  # "stop" | "length"
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] | None = None  # those of token_ids, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # those of the prompt; its first token has none

    def __repr__(self) -> str:
        return (
            f"Result(text={shorten(self.text)!r}, tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, "
            f"tau={self.stats.tau:.2f}, tokens_per_second={self.stats.tokens_per_second:.0f})"
        )


@dataclass(frozen=True)
class Piece:
    """The part of a streamed answer that one cycle adds."""

    text: str  # empty while characters are incomplete or may become a stop string
    token_ids: tuple[int, ...]
    accepted: int  # draft tokens among them
    finish_reason: str | None  # set in the last piece
    logprobs: tuple[TokenLogprobs, ...] = ()  # those of token_ids, if they were asked for


def shorten(text: str) -> str:
    """Return the beginning of a text for `repr`."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class TextReader:
    """Reads a request's tokens as text; tells the engine when a stop string is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: str | Sequence[str] | None = None) -> None:
        if tokenizer is None and stop:
            raise InputError("stop strings need a tokenizer, but this target has none")
        self._tokenizer = tokenizer
        self._stops = None if tokenizer is None else StopStrings(tokenizer, stop)
        self._has_stops = bool(stop)
        self.stop_string: str | None = None  # the one that ended the text
        self._taken: list[str] = []
        self._new: list[str] = []

    def feed(self, token: int) -> bool:
        """Read one token; True where it completes a stop string."""
        if self._stops is None:
            return False
        piece = self._stops.feed(token)
        self._new.append(piece.text)
        self.stop_string = piece.hit
        return piece.hit is not None

    def stops_after(self, tokens: Sequence[int]) -> bool:
        """Return whether `feed` would return True for the last of these tokens. Changes nothing."""
        if self._stops is None or not self._has_stops:
            return False
        ahead = deepcopy(self._stops, {id(self._tokenizer): self._tokenizer})
        return any(ahead.feed(token).hit is not None for token in tokens)

    def take(self, final: bool = False) -> str:
        """Return the text since the last call; `final` adds the text that was held back."""
        if final and self._stops is not None:
            self._new.append(self._stops.flush())
        text = "".join(self._new)
        self._new = []
        self._taken.append(text)
        return text

    def text(self) -> str:
        """All text so far, with the text that is held back."""
        tail = "" if self._stops is None else self._stops.tail()
        return "".join([*self._taken, *self._new, tail])


class Answer:
    """A request's steps so far, added up."""

    def __init__(self, request: Request, reader: TextReader) -> None:
        self.request = request
        self.reader = reader
        self.totals = StepTotals()
        # None: not asked for
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def add(self, step: Step) -> Piece:
        """Add one Step of the engine, and return the new piece of the answer."""
        self.totals.add(step)
        logprobs: tuple[TokenLogprobs, ...] = step.extra.get("logprobs", ())
        if "logprobs" in step.extra:
            self.logprobs = (self.logprobs or []) + list(logprobs)
        self.prompt_logprobs = step.extra.get("prompt_logprobs", self.prompt_logprobs)
        return Piece(self.reader.take(final=step.finish is not None), step.tokens, step.accepted, step.finish, logprobs)

    def result(self) -> Result:
        """Return the answer so far; one that was cancelled counts as ended by its length."""
        totals = self.totals
        stats = Stats.from_totals(totals, self.request)
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        text, ids = self.reader.text(), tuple(totals.token_ids)
        return Result(text, ids, totals.finish or "length", stats, logprobs, self.prompt_logprobs)


class Stream(Iterator[Piece]):
    """An answer that is being decoded, piece by piece."""

    _open = False  # until the request is added: `__del__` also runs if `add` fails, or Ctrl-C comes first

    def __init__(
        self,
        decoder: Decoder,
        answer: Answer,
        at_end: Callable[[], None],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._answer = answer
        self._at_end = at_end
        self._on_step = on_step
        self._pieces = deque[Piece]()
        self._error: EyasError | None = None  # raised after the pieces
        self._request_id = decoder.add(answer.request)
        self._open = True

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        with self._decoder.target.turn:
            while not self._pieces:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if not self._open:
                    raise StopIteration
                self._step()
            return self._pieces.popleft()

    def _step(self) -> None:
        try:
            steps = self._decoder.step()
        except BaseException:
            self._open = False
            self._decoder.cancel(self._request_id)
            raise
        for step in steps:
            if step.request_id == self._request_id:
                if self._on_step is not None:
                    self._on_step(step)
                self._pieces.append(self._answer.add(step))
                self._error = step.error
        if self._answer.totals.finish:
            self._open = False
            if self._error is None:
                self._at_end()

    def close(self) -> None:
        """Cancel the request."""
        if not self._open:
            return
        with self._decoder.target.turn:
            if self._open:
                self._open = False
                self._decoder.cancel(self._request_id)
                self._at_end()

    def __del__(self) -> None:
        self.close()

    def result(self) -> Result:
        """Return the answer so far."""
        return self._answer.result()
