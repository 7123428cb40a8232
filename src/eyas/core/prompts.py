"""Reads prompts: which one next, how many of its tokens, and after which cached prefix.

With a budget, a step of the decoder reads at most that number of prompt tokens, and then runs the
cycle of the rows whose prompts have been read:

    step        1         2         3         4         5
    row 0    cycle     cycle     cycle     cycle     cycle
    row 1    [ 256 ]   [ 256 ]   [64] cycle ...            a prompt of 576 tokens, a budget of 256
    row 2                        [192 ]    [ 8 ] cycle     a prompt of 200 tokens, which came later

**Budgets.** A number of tokens is the same for every machine and load. With "auto", reading takes
about `PREFILL_PER_CYCLE` times as long as a cycle takes at present. Then two tokens of a running row are about
1 + `PREFILL_PER_CYCLE` = 2.5 cycles apart while one prompt is read. While n prompts are read they are 1 + n
`PREFILL_PER_CYCLE` cycles apart, for any number of rows. Every prompt gets this time for itself: if all shared
it, rows would stay empty while prompts queue, and all would wait longer. While no row runs, chunks are large.

**Order.** The prompt with the fewest tokens left is read first; in every `OLDEST_EVERY`-th step the
oldest one is. So a short prompt does not wait for a long one, and a long one gets at least 1 /
`OLDEST_EVERY` of the budget however many shorter ones come. Without a budget prompts are read
whole, in order of arrival. Rows are always given away in order of arrival.

**Prefixes.** Each row holds the keys and values of some text: its request's, which is in flight, or its last
request's, which is kept. A new prompt is read from the end of the longest prefix that it shares with any of
them. It replaces a kept text if it shares half of that text or more; otherwise the prefix is copied into the
empty row whose text was used least recently. Tokens that the drafter's session cannot copy are read again; so
are those after the last known state of a target with recurrent state (`TargetSession.longest_known_prefix`).

This module knows no requests' sampling, no cycles and no method.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch import Tensor

from eyas.core.cache import common_prefix
from eyas.core.drafter import DraftSession
from eyas.core.features import PromptLogits
from eyas.core.requests import Request
from eyas.core.target import TargetSession
from eyas.errors import EyasError, OptionError
from eyas.timing import StageTimer

__all__ = ["OLDEST_EVERY", "Budget", "Prompt", "PromptReader"]

Budget = int | Literal["auto"] | None  # prompt tokens that a step reads, at most; None: whole prompts

OLDEST_EVERY = 4  # in one of this many steps the oldest prompt is read first
PREFILL_PER_CYCLE = 1.5  # with a budget of "auto": seconds of reading per second of cycles
MIN_AUTO_BUDGET, MAX_AUTO_BUDGET = 4, 512  # with a budget of "auto": fewest and most tokens of a step
AVERAGE_WEIGHT = 0.3  # weight of the newest measurement in a moving average
WORTH_COPYING = 8  # tokens by which a prefix of another row must be longer than one in the row itself


@dataclass
class Prompt:
    """A request whose prompt is not read yet, or not all of it."""

    request_id: int
    request: Request
    row: int = -1  # the row that it is read into; -1: it waits for one
    cached_tokens: int = 0  # prompt tokens whose keys and values were there already
    read: int = 0  # prompt tokens in the caches, those kept included
    timer: StageTimer | None = None  # started when the prompt got its row
    logits_readers: tuple[PromptLogits, ...] = ()  # the request's features that read the prompt's logits

    def report(self) -> dict[str, Any]:
        """Return the findings of features in the prompt, for `Step.extra`."""
        return {name: value for reader in self.logits_readers for name, value in reader.report().items()}

    def read_logits(self, logits_TV: Tensor, position: int) -> None:
        """Show a chunk's logits to the features that read them."""
        for reader in self.logits_readers:
            reader.read(logits_TV, position)

    @property
    def remaining(self) -> int:
        """Prompt tokens yet to be read."""
        return len(self.request.prompt) - self.read


class PromptReader:
    """Reads prompts into the rows of a decoder.

    Args:
        extra_slots: cache slots that cycles need in addition to the slots of prompt and new tokens.
        reuse: start after prefixes that rows hold, and keep the text of rows whose requests have
            ended.
        budget: see "Budgets" above.
    """

    def __init__(
        self, target: TargetSession, drafter: DraftSession, extra_slots: int, reuse: bool, budget: Budget,
    ) -> None:  # fmt: skip
        if budget not in ("auto", None) and (not isinstance(budget, int) or budget < 1):
            raise OptionError(
                f"prefill_budget must be 1 or more tokens, auto, or None for whole prompts, got {budget!r}"
            )
        self.target, self.drafter, self.extra_slots = target, drafter, extra_slots
        self.reuse, self.budget = reuse, budget
        self.waiting: deque[Prompt] = deque()
        self.reading: dict[int, Prompt] = {}  # prompts that are being read, by row
        self.empty = set(range(target.rows))  # rows without a request
        # the text whose keys and values a row holds, as far as the target's length
        self.texts: list[Sequence[int]] = [()] * target.rows
        self._unshared = set[int]()  # rows whose keys and values depend on more than their text: on images
        self._used_at = [0] * target.rows  # when a row's text was last used; counted in prompts
        self._steps = self._started = 0
        # seconds of cycles that other decoders run between two steps of this one, on the same
        # machine
        self.other_decoders_seconds = 0.0
        # moving averages of the seconds of a cycle, and of the seconds of reading a token; 0: not known yet
        self._cycle_seconds = self._token_seconds = 0.0

    def __bool__(self) -> bool:
        """Return whether any prompt waits or is being read."""
        return bool(self.waiting or self.reading)

    def add(self, request_id: int, request: Request) -> None:
        """Put a request into the queue."""
        self.waiting.append(Prompt(request_id, request))

    def cancel(self, request_id: int) -> bool:
        """Drop a request whose prompt is not read yet; False if this number is not one of them."""
        for prompt in self.waiting:
            if prompt.request_id == request_id:
                self.waiting.remove(prompt)
                return True
        for row, prompt in self.reading.items():
            if prompt.request_id == request_id:
                del self.reading[row]
                self.release(row)
                return True
        return False

    def release(self, row: int, failed: bool = False) -> None:
        """Make the row empty. With `reuse` its text stays, for later prompts, unless its request
        has failed: its keys and values may be NaN."""
        self.empty.add(row)
        if failed:
            self.texts[row] = ()
            self.drafter.clear(row)
            self.target.clear(row)
        elif not self.reuse:
            self.texts[row] = ()
            self.drafter.end(row)
            self.target.truncate(row, 0)
        else:  # a cycle that ran ahead, or the last path, may extend past the end of the text
            self.target.truncate(
                row, self.target.longest_known_prefix(row, min(self.target.lengths[row], len(self.texts[row])))
            )

    def observe(self, seconds: float) -> None:
        """Take the seconds of a cycle."""
        self._cycle_seconds = _average(self._cycle_seconds, seconds)

    @property
    def tokens_per_step(self) -> int | None:
        """The budget of the coming step; None: whole prompts."""
        if self.budget != "auto":
            return self.budget
        running = self.target.rows - len(self.empty) - len(self.reading)
        seconds = self.other_decoders_seconds + (self._cycle_seconds if running else 0.0)
        if not seconds:
            return MAX_AUTO_BUDGET
        if not self._token_seconds:
            return MIN_AUTO_BUDGET
        prompts = max(1, len(self.reading) + min(len(self.waiting), len(self.empty)))
        return max(
            MIN_AUTO_BUDGET, min(MAX_AUTO_BUDGET, int(prompts * PREFILL_PER_CYCLE * seconds / self._token_seconds))
        )

    def read(self) -> Iterator[tuple[Prompt, Tensor | EyasError]]:
        """Read prompts as far as the budget of one step goes.

        Yields each complete prompt with the logits [V] of its last token. It also yields, with the error, each
        prompt that does not fit the memory or that the model refuses; its row is empty again. The caller may
        release a row before it asks for the next prompt.
        """
        self._steps += 1
        budget_left = self.tokens_per_step
        while (budget_left is None or budget_left > 0) and (prompt := self._next()) is not None:
            count = 0
            try:
                if prompt.row < 0:
                    self._start(prompt)
                count = (
                    prompt.remaining
                    if budget_left is None or prompt.request.media
                    else min(budget_left, prompt.remaining)
                )
                logits_V = self._read(prompt, count)
            except EyasError as error:
                if prompt.row >= 0:
                    del self.reading[prompt.row]
                    self.release(prompt.row, failed=True)
                budget_left = None if budget_left is None else budget_left - count
                yield prompt, error
                continue
            budget_left = None if budget_left is None else budget_left - count
            if not prompt.remaining:
                del self.reading[prompt.row]
                yield prompt, logits_V

    def _next(self) -> Prompt | None:
        """Return the prompt to read next; None if no row can read one."""
        able = [*self.reading.values(), *islice(self.waiting, len(self.empty))]
        oldest_first = self.budget is None or self._steps % OLDEST_EVERY == 0
        return min(able, key=lambda prompt: (0 if oldest_first else prompt.remaining, prompt.request_id), default=None)

    def _read(self, prompt: Prompt, count: int) -> Tensor:
        """Let target and drafter read the next tokens; returns the logits [V] of the last one."""
        assert prompt.timer is not None
        row, tokens, timer = prompt.row, prompt.request.prompt[prompt.read : prompt.read + count], prompt.timer

        def on_chunk(tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
            began = timer.now()
            self.drafter.prefill(row, tokens_T, features_TF, position)
            self.drafter.observe_prompt(row, len(tokens_T), timer.now() - began)

        before = prompt.timer.stage_seconds.get("prompt", 0.0)
        with prompt.timer.stage("prompt"):
            on_logits = prompt.read_logits if prompt.logits_readers else None
            logits_V = self.target.prefill(row, tokens, on_chunk, on_logits, prompt.request.media)
        if count >= MIN_AUTO_BUDGET and not prompt.request.media:  # short chunks and images cost more per token
            self._token_seconds = _average(self._token_seconds, (prompt.timer.stage_seconds["prompt"] - before) / count)
        prompt.read += count
        return logits_V

    # --- prefixes

    def _start(self, prompt: Prompt) -> None:
        """Give the prompt an empty row, which then holds the longest prefix of the prompt that any row holds."""
        request, prompt.timer = prompt.request, StageTimer()
        self.waiting.remove(prompt)
        self.target.reserve(len(request.prompt) + request.max_new_tokens + self.extra_slots)
        row, source, shared = self._place(() if request.media else request.prompt)
        kept = 0
        readers = [feature.prompt_logits(request.prompt) for feature in request.features]
        prompt.logits_readers = tuple(reader for reader in readers if reader is not None)
        if shared and not prompt.logits_readers:  # readers want the logits of all tokens
            kept = self._reusable_prefix(row, source, shared)
        self.drafter.begin(row, kept, len(request.prompt))
        if source == row:
            self.target.truncate(row, kept)
        else:
            self.target.copy(source, row, kept)
        self._started += 1
        self._used_at[row] = self._used_at[source] = self._started
        self.texts[row] = request.prompt
        (self._unshared.add if request.media else self._unshared.discard)(row)
        self.empty.remove(row)
        self.reading[row] = prompt
        prompt.row, prompt.cached_tokens, prompt.read = row, kept, kept

    def _place(self, prompt: Sequence[int]) -> tuple[int, int, int]:
        """Return (the row for the prompt, the row whose prefix it starts after, the length of that prefix)."""
        shared = [self._shared(row, prompt) for row in range(self.target.rows)]
        unused_first = sorted(self.empty, key=lambda row: (len(self.texts[row]) > 0, self._used_at[row], row))
        source = max(range(self.target.rows), key=lambda row: (shared[row], row in self.empty, -row))
        if source in self.empty and (2 * shared[source] >= len(self.texts[source]) or len(self.empty) == 1):
            return source, source, shared[source]
        row = next(row for row in unused_first if row != source or len(unused_first) == 1)
        if shared[source] < shared[row] + WORTH_COPYING:
            source = row
        return row, source, shared[source]

    def _shared(self, row: int, prompt: Sequence[int]) -> int:
        """Return how many tokens of the prompt are in the row's cache already. The last one is always
        read: its logits are wanted."""
        if not self.reuse or row in self._unshared or not prompt:
            return 0
        return self.target.longest_known_prefix(
            row, min(common_prefix(self.texts[row], prompt), self.target.lengths[row], len(prompt) - 1)
        )

    def _reusable_prefix(self, row: int, source: int, shared: int) -> int:
        """Return how many of the shared tokens both the drafter's session and the target can reuse."""
        kept = shared
        while kept:
            fewer = self.drafter.truncate(row, kept) if source == row else self.drafter.copy(source, row, kept)
            kept = self.target.longest_known_prefix(source, fewer)
            if kept == fewer:
                break
        return kept


def _average(average: float, newest: float) -> float:
    """Return the moving average with the newest value in it; an `average` of 0 means that there is none yet."""
    return average + AVERAGE_WEIGHT * (newest - average) if average else newest
