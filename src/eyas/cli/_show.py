"""Answers as they come: adding up the pieces of a stream, and which characters of them were drafted."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.api import LLM, Piece, Result

__all__ = ["Painter", "Tally", "summary"]


class Tally:
    """Hands on the pieces of an answer and adds them up; its clock runs only while the decoder works, not while its text is shown."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        self.finish_reason: str | None = None
        self.seconds = 0.0
        self.prefill_seconds = 0.0  # known only of answers that `of` decodes: a stream does not say it
        self.decided: list[str] = []  # likewise

    @classmethod
    def of(cls, llm: LLM, prompt: str | Sequence[int], **keywords: Any) -> Tally:
        """Of a prompt; keywords as for LLM.generate."""
        tally = cls(iter(()))
        tally._pieces = tally._decode(llm, prompt, keywords)
        return tally

    def _decode(self, llm: LLM, prompt: str | Sequence[int], keywords: dict[str, Any]) -> Iterator[Piece]:
        from eyas.adaptive.dormant import adapted
        from eyas.api import Piece
        from eyas.core.engine import Decoder

        request, reader = llm.request(prompt, **keywords)
        decoder = Decoder(llm.target, adapted(llm.drafter, llm.policy))
        decoder.add(request)
        while not decoder.finished:
            for step in decoder.step():
                if step.prefill:
                    self.prefill_seconds = step.seconds
                else:
                    self.decided.append(step.plan)
                yield Piece(reader.take(final=step.finish is not None), step.tokens, step.accepted, step.finish)

    def __iter__(self) -> Tally:
        return self

    def __next__(self) -> Piece:
        began = time.perf_counter()
        try:
            piece = next(self._pieces)
        finally:
            self.seconds += time.perf_counter() - began
        if self.token_ids:  # the first piece is the prompt's own token
            self.accepted.append(piece.accepted)
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        return piece

    def result(self, otherwise: str = "interrupted") -> Result:
        """What came so far; `otherwise` is the reason of a stream that was not read to its end."""
        from eyas.api import Result, Stats

        emitted = max(0, len(self.token_ids) - 1)
        stats = Stats(
            len(self.accepted), tuple(self.accepted), self.seconds, self.prefill_seconds, tokens=emitted, decisions=Counter(self.decided)
        )
        return Result("".join(self.text), tuple(self.token_ids), self.finish_reason or otherwise, stats)


class Painter:
    """Splits the text of pieces into what was drafted and what was not.

    A piece's text may come later than its tokens (characters that were incomplete, the beginning of a stop string): the texts of the tokens
    wait in a line, each with its mark, and the text of the pieces is matched against them from the left.
    """

    def __init__(self, llm: LLM) -> None:
        from eyas.text import Detokeniser

        self._detokeniser = Detokeniser(llm.tokenizer) if llm.tokenizer is not None else None
        self._waiting: deque[tuple[str, bool]] = deque()

    def split(self, piece: Piece) -> list[tuple[str, bool]]:
        """(text, drafted) in order; the texts together are the piece's own."""
        if self._detokeniser is None:
            return []
        for i, token in enumerate(piece.token_ids):
            self._waiting.append((self._detokeniser.feed(token), i < piece.accepted))
        spans, left = list[tuple[str, bool]](), piece.text
        while left and self._waiting:
            text, drafted = self._waiting.popleft()
            if len(text) > len(left):
                self._waiting.appendleft((text[len(left) :], drafted))
                text = text[: len(left)]
            if text:
                spans.append((left[: len(text)], drafted))
            left = left[len(text) :]
        return [*spans, (left, False)] if left else spans  # what was held back to the very end belongs to no token


def summary(llm: LLM, result: Result) -> str:
    """One line about an answer; its speed is that of the whole answer, the prompt's pass included."""
    stats, tokens = result.stats, len(result.token_ids)
    speed = f" in {stats.seconds:.2f} s ({tokens / stats.seconds:.1f} tokens/s)" if stats.seconds else ""
    end = {"length": ", cut at the length asked for", "interrupted": ", interrupted"}.get(result.finish_reason, "")
    return f"{tokens} token{'s' * (tokens != 1)}{speed}, tau {stats.tau:.2f}, {llm.method}{end}"
