"""The engine: add requests, then step until all are finished (continuous batching: requests enter
empty rows between cycles).

    step = read prompts (core/prompts.py)
           -> draft -> one forward of the target over the tree -> verify -> commit (core/cycle.py) -> emit

A `Step` is the result of one cycle for one row; generate, stream and metrics add Steps up.

**Running ahead.** On a GPU a cycle is launched, and finished some time later. If the next cycle of
the same rows needs nothing that the host must read first (`CycleRunner.launch_ahead`), it is launched ahead of
reading the last result. So the GPU does not wait:

    host    launch 1   launch 2   read 1   launch 3   read 2   ...
    GPU     [ cycle 1         ][ cycle 2         ][ cycle 3

A row that has ended meanwhile ignores the cycle that ran ahead, and its length is cut back when the
row is released. The other rows use it. So ids, noise and Steps are the same as if each cycle waited for its
predecessor. A request that enters in between joins one cycle later.

This module knows no method, no tokenizer and no model family. An adaptive drafter is a drafter like any other.
Letters: B rows of the cycle, b the decoder's number of a row, P places of the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.cycle import CycleRunner, Verify
from eyas.core.dormant import DormantSession
from eyas.core.drafter import CycleInput, Drafter
from eyas.core.prompts import Budget, Prompt, PromptReader
from eyas.core.requests import Request, Step, check_request
from eyas.core.row_drafts import check_drafting
from eyas.core.rows import Row, RowSettings, first_token_cycle, make_cycle_input
from eyas.core.target import Target, refuse_autocast
from eyas.core.tree import Cycle, Draft, Verdict
from eyas.core.verify import verify
from eyas.errors import EyasError, InputError, OptionError
from eyas.threads import cpu_by_default, release_threads
from eyas.timing import StageTimer

__all__ = ["Decoder", "Request", "StageTimer", "Step", "Verify", "Watch"]

Watch = Callable[[CycleInput, Draft, Tensor, Verdict], None]  # (cycle input, draft, target's scores_BNV, verdict)


@dataclass(frozen=True)
class _Launched:
    """A cycle whose result the host has not read."""

    cycle_input: CycleInput
    cycle: Cycle
    rows: tuple[Row | None, ...]  # the decoder's rows at launch

    def live_rows(self, rows: Sequence[Row | None]) -> list[int | None]:
        """Return the number of each row of the cycle; None if it was empty, or its request has left."""
        return [b if row is not None and row is rows[b] else None for b, row in enumerate(self.rows)]


class Decoder:
    """Decodes up to `rows` requests at a time; further ones wait in a queue.

    Args:
        reuse: a prompt is read from the end of the longest prefix that it shares with the text of
            any row. Finished rows keep their keys and values for that.
        prefill_budget: most prompt tokens that a step reads; rows that are still reading take no
            part in cycles. "auto": in proportion to the time of a cycle (`core.prompts`). None:
            whole prompts.
        verify: the verification rule. Any other than `core.verify.verify` is an experiment: the
            text is then not the target's.
        watch: called after every cycle with its input, draft, scores and verdict; its time is not
            part of `Step.seconds`.
    """

    def __init__(
        self, target: Target, drafter: Drafter, rows: int = 1, reuse: bool = False, *, prefill_budget: Budget = None,
        verify: Verify = verify, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.target, self.watch = target, watch
        self.target_session = target.open(rows, drafter.feature_layers)
        self.draft_session = DormantSession(drafter, rows)
        self.cycle_runner = CycleRunner(self.target_session, self.draft_session, verify)
        if watch is None:
            self.cycle_runner = target.runner.wrap_cycle(self.cycle_runner)
        self.prompts = PromptReader(
            self.target_session, self.draft_session, self.cycle_runner.extra_slots, reuse, prefill_budget
        )
        self.rows: list[Row | None] = [None] * rows  # requests whose prompts have been read
        self._last_request_id = 0
        self._settings: RowSettings | None = None  # None: a request has entered or left a row since the last cycle
        self._root_tokens_B: Tensor | None = None  # the last cycle's bonus tokens, which are on the device already
        self._ahead: _Launched | None = None
        # a step or a cancellation has been interrupted (Ctrl-C, out of memory): a request may be in no list, a row half written
        self.broken = False

    @property
    def finished(self) -> bool:
        """Whether no request is queued, being read or being decoded."""
        return not self.prompts and not any(self.rows)

    def add(self, request: Request) -> int:
        """Put a request into the queue; return its number. Raise InputError or FitError at once if it cannot be
        served."""
        check_request(request, self.target.vocab_size)
        check_drafting(request)
        if request.adapter not in (None, self.target.adapter):
            raise OptionError(
                f"this decoder serves the adapter {self.target.adapter!r}, but the request asks for {request.adapter!r}"
            )
        if request.media:
            self.target.check_media(request.media, request.prompt)
        self.target_session.check_fit(len(request.prompt), request.max_new_tokens)
        self._last_request_id += 1
        # transformers' -1, and ids beyond the vocabulary, are never drawn, so they end nothing
        eos = frozenset(token for token in request.eos if 0 <= token < self.target.vocab_size)
        self.prompts.add(self._last_request_id, replace(request, eos=eos))
        return self._last_request_id

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        """Drop a request that is queued, whose prompt is being read, or that is being decoded. A broken decoder has none."""
        with self.target.turn:
            if self.broken:
                return
            with self._whole_change():
                if not self.prompts.cancel(request_id):
                    for b in [b for b, row in enumerate(self.rows) if row is not None and row.request_id == request_id]:
                        self._release(b)

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """Prefill prompts, as far as the budget goes; then run one cycle for all rows in flight,
        also those whose prompt has just been read. Threads that step Decoders of one model take turns.

        Returns:
            first a Step for each prompt that was completed, which holds its first token; then one
            for each row of the cycle. Empty if there was nothing to do.
        """
        refuse_autocast(self.target.device)
        with self.target.turn, self._whole_change(), cpu_by_default():
            return self._step()

    @contextmanager
    def _whole_change(self) -> Iterator[None]:
        """Mark the decoder as broken if the block does not reach its end."""
        if self.broken:
            raise InputError("an earlier step of this Decoder did not reach its end: make a new Decoder")
        self.broken = True
        yield
        self.broken = False

    def _step(self) -> list[Step]:
        prefills = [self._first_token(prompt, read) for prompt, read in self.prompts.read()]
        timer = StageTimer()
        if (launched := self._launch(timer)) is None:
            return prefills
        self._ahead = self._launch_ahead(launched, timer)
        cycle_input, cycle = launched.cycle_input, launched.cycle
        steps = self._emit(cycle, launched.live_rows(self.rows), timer)
        self.draft_session.observe(steps)
        self.prompts.observe(steps[0].seconds)
        if self.watch is not None:
            self.watch(cycle_input, cycle.draft, cycle.scores_BNV.float(), cycle.verdict)
        return prefills + steps

    def _launch(self, timer: StageTimer) -> _Launched | None:
        """Return the cycle that ran ahead, if a row of it is still in flight; else launch one for all rows
        in flight. None: there are none."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and any(b is not None for b in ahead.live_rows(self.rows)):
            return ahead
        if not any(self.rows):
            return None
        if self._settings is None or self._root_tokens_B is None:
            newest = [row.tokens[-1] if row else 0 for row in self.rows]
            self._root_tokens_B = torch.tensor(newest, device=self.target.device)
        cycle_input = self._cycle_input(self._root_tokens_B, max(self.target_session.lengths))
        cycle = self.cycle_runner(cycle_input, timer)
        self._root_tokens_B = cycle.verdict.bonus_B
        return _Launched(cycle_input, cycle, tuple(self.rows))

    def _launch_ahead(self, last: _Launched, timer: StageTimer) -> _Launched | None:
        """Launch the cycle after `last` for the same rows, if nothing that the host must read first decides
        about it. Do not if a row may reach its length in `last`, or has entered or left."""
        max_emitted = last.cycle.verdict.path_BP.shape[1]
        if self._settings is None or any(row.remaining <= max_emitted for row in self.rows if row):
            return None
        cycle_input = self._cycle_input(last.cycle.verdict.bonus_B, max(self.target_session.lengths) + max_emitted)
        if (cycle := self.cycle_runner.launch_ahead(cycle_input, timer)) is None:
            return None
        self._root_tokens_B = cycle.verdict.bonus_B
        return _Launched(cycle_input, cycle, last.rows)

    def _cycle_input(self, root_tokens_B: Tensor, max_position: int) -> CycleInput:
        """Return the input of the next cycle of all rows."""
        self._settings = self._settings or RowSettings.from_rows(self.rows, self.target)
        session = self.target_session
        return make_cycle_input(self.rows, self._settings, root_tokens_B, session.length_B, max_position, session.cache)

    def _first_token(self, prompt: Prompt, read: Tensor | EyasError) -> Step:
        """Return the row of a prompt that is read, and its first token.

        The token is drawn by `verify` from a tree whose only node is the prompt's last token, so
        prompt and cycles share one rule.

        Args:
            read: logits [V] of the prompt's last token; or the error why it cannot be read.
        """
        timer, b = prompt.timer, prompt.row
        assert timer is not None
        row = Row.from_request(prompt.request_id, prompt.request, self.target)
        if isinstance(read, EyasError):
            return row.fail(0, read, timer)
        self.rows[b], self._settings, self.prompts.texts[b] = row, None, row.tokens
        step_fields = {"cached_tokens": prompt.cached_tokens, "extra": prompt.report()}
        (step,) = self._emit(first_token_cycle(row, read, self.target), [b], timer, step_fields)
        return step

    def _emit(
        self, cycle: Cycle, rows: Sequence[int | None], timer: StageTimer, prefill_fields: dict[str, Any] | None = None
    ) -> list[Step]:
        """Read the result of a cycle of these rows, its only transfer to the host, and append the
        tokens to the rows.

        Args:
            rows: the decoder's row for each row of the cycle; the result of None is ignored.
            prefill_fields: fields of the Step of a prompt's first token; None in a cycle of all rows.
        """
        columns, P, lengths = cycle.read_on_host(), cycle.verdict.path_BP.shape[1], self.target_session.lengths
        if prefill_fields is None:
            accepted = [columns[b][0] if rows[b] is not None else 0 for b in range(len(lengths))]
            self.target_session.set_host_lengths([n + more for n, more in zip(lengths, accepted, strict=True)])
        steps = []
        for number, (b, (length, bonus, nan, *rest)) in enumerate(zip(rows, columns, strict=True)):
            if b is None or (row := self.rows[b]) is None:
                continue
            tokens, path = [*rest[1:length], bonus], tuple(rest[P : P + length])
            step_fields = prefill_fields
            if step_fields is None:
                step_fields = {"path": path, "draft": cycle.draft, "decision": self.draft_session.decision}
            good, error = (0, self.target.nan_error(row.tokens)) if nan else cycle.first_failure(number, path)
            emitted, error = row.emit(tokens[:good], error)
            if row.finish:
                self._release(b, failed=error is not None)
            if row.features:
                report = row.report(cycle, number, emitted, path if prefill_fields is None else ())
                step_fields = {**step_fields, "extra": step_fields.get("extra", {}) | report}
            steps.append(row.step(b, emitted, timer, error=error, **step_fields))
        return steps

    def _release(self, b: int, failed: bool = False) -> None:
        """Empty the row. With `reuse` its keys and values stay, for later prompts, unless its
        request has failed."""
        self.rows[b], self._settings = None, None
        self.prompts.release(b, failed)
        if self.finished and self.target.device.type == "cpu":
            release_threads()
