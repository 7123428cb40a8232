"""The asyncio side of one job: the Deltas that the engine thread has made so far, in the order in
which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from eyas.serve.records import Delta


class Answer:
    """The text generated for one job, for a single reader. `join`: Deltas that have not been taken yet become one."""

    def __init__(self, count: int, cancel: Callable[[Answer], None], join: bool = True) -> None:
        self.count = count
        self._open = count  # sequences that have not ended
        self._arrived: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._written = 0.0  # when the client was last written to, in the event loop's time
        self._timer: asyncio.TimerHandle | None = None
        self._cancel = cancel
        self._join = join

    def put(self, deltas: Iterable[Delta]) -> None:
        """Add Deltas; called in the event loop."""
        self._arrived.extend(deltas)
        self._news.set()

    def written(self) -> None:
        """Note that the client is written to: not every Delta can be read by it, such as the pieces of a call."""
        self._written = asyncio.get_running_loop().time()

    async def deltas(self, keep_alive: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield each Delta until every sequence has ended, and None after `keep_alive` seconds without
        `written`. Raise the error of a sequence. Close the Answer afterwards."""
        self.written()
        while self._open:
            if keep_alive is not None and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(keep_alive, self._check_silence, keep_alive)
            await self._news.wait()
            for delta in self._take():
                if delta.error is not None:
                    raise delta.error
                self._open -= delta.finish is not None
                yield delta
            if self._open and self._timer is None and keep_alive is not None:
                yield None

    def close(self) -> None:
        """End the answer: stop its timer, and cancel the sequences that are not done."""
        if self._timer is not None:
            self._timer.cancel()
        if self._open:
            self._open = 0
            self._cancel(self)

    def _check_silence(self, seconds: float) -> None:
        """Wake the reader after silence. One timer serves many Deltas: setting one costs more than sending one."""
        loop = asyncio.get_running_loop()
        left = self._written + seconds - loop.time()
        self._timer = loop.call_later(left, self._check_silence, seconds) if left > 0 else None
        if self._timer is None:
            self._news.set()

    def _take(self) -> list[Delta]:
        arrived = list(self._arrived)
        self._arrived.clear()
        self._news.clear()
        if not self._join:
            return arrived
        joined: dict[int, Delta] = {}
        for delta in arrived:
            before = joined.get(delta.index)
            joined[delta.index] = delta if before is None or delta.error else before.joined(delta)
        return list(joined.values())
