"""Streaming: one `Piece` per cycle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from eyas.api._results import Answer, Piece, Result
from eyas.core.engine import Decoder, Step
from eyas.errors import EyasError


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
