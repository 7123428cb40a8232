"""Tokens of all rows in step, as the loop of transformers hands them to stopping criteria and streamers.

The engine's rows advance at different speeds. Here token t of every row is looked at together, as soon as all rows
have it: first by the criteria, then by the streamer. Where that ends a row, tokens that it has decoded beyond
    are dropped.

Letters: B rows, T tokens of the widest prompt, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from eyas.api import LLM, Stats
from eyas.core.requests import Step
from eyas.core.totals import StepTotals
from eyas.errors import EyasError
from eyas.hooks.sampling import Distribution


class Lockstep:
    """The texts of a batch, token by token."""

    def __init__(
        self,
        distribution: Distribution,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer: Any,
    ) -> None:
        self.distribution, self.processors, self.criteria, self.streamer = distribution, processors, criteria, streamer
        wanted = bool(config.return_dict_in_generate)
        self.wants_scores = wanted and bool(config.output_scores)
        self.wants_logits = wanted and bool(config.output_logits)
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad: Tensor | None = getattr(config, "_pad_token_tensor", None)
        # None: rows that have ended are decoded until all have
        self.pad = int(pad) if pads and pad is not None else None
        ids_BT = distribution.batch.ids_BT
        self.ended = [False] * len(ids_BT)
        self.columns: list[list[int]] = []  # the tokens of all rows; padding in rows that have ended
        self.scores: tuple[Tensor, ...] = ()  # float32 [B, V] for each column; zeros in rows that have ended
        self.logits: tuple[Tensor, ...] = ()
        self._undelivered = [deque[tuple[int, Tensor | None]]() for _ in self.ended]
        keeps_texts = distribution.custom_criteria or self.wants_scores
        room = distribution.max_new_tokens if keeps_texts else 0
        self._texts = torch.cat([ids_BT, ids_BT.new_empty(len(ids_BT), room)], 1)

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.ended)

    @property
    def needs_logits(self) -> bool:
        """Whether the result holds scores or logits."""
        return self.wants_scores or self.wants_logits

    @property
    def needs_all_rows(self) -> bool:
        """Whether all rows are decoded together, because criteria or a streamer look at them."""
        return self.distribution.custom_criteria or self.streamer is not None

    def feed(self, row: int, step: Step) -> None:
        """Note the tokens of a step of one row, with the logits that the call asked for."""
        raw = step.extra.get("logits")
        logits = [None] * len(step.tokens) if raw is None else list(raw.clone())
        self._undelivered[row].extend(zip(step.tokens, logits, strict=True))

    def advance(self) -> list[int]:
        """Look at all columns that are complete; returns the rows that need no further tokens."""
        before = list(self.ended)
        while not self.finished and not any(map(self.waits_for, range(len(self.ended)))):
            self._column()
        stopped = [row for row, ended in enumerate(self.ended) if ended and not before[row]]
        return stopped if self.pad is not None or self.finished else []

    def waits_for(self, row: int) -> bool:
        """Return whether the row's next token is wanted and has not been decoded."""
        return not self._undelivered[row] and not self._is_padded(row)

    def _is_padded(self, row: int) -> bool:
        return self.pad is not None and self.ended[row]

    def _column(self) -> None:
        taken = [
            (self.pad or 0, None) if self._is_padded(row) else self._undelivered[row].popleft()
            for row in range(len(self.ended))
        ]
        tokens = [token for token, _ in taken]
        if self.needs_logits:
            self._keep_scores([logits_V for _, logits_V in taken])
        column = torch.tensor(tokens, device=self._texts.device)
        self.columns.append(tokens)
        if self._texts.shape[1] > self.distribution.batch.width:
            self._texts[:, self.distribution.batch.width + len(self.columns) - 1] = column
        self.ended = [done or ends for done, ends in zip(self.ended, self._ends(tokens), strict=True)]
        if self.streamer is not None:
            self.streamer.put(column.cpu())

    @property
    def _seen(self) -> Tensor:
        """The texts up to the newest column, [B, T + columns]."""
        return self._texts[:, : self.distribution.batch.width + len(self.columns)]

    def _keep_scores(self, logits: list[Tensor | None]) -> None:
        device = self._texts.device
        empty_V = torch.zeros_like(next(logits_V for logits_V in logits if logits_V is not None), device=device)
        logits_BV = torch.stack([empty_V if logits_V is None else logits_V.to(device) for logits_V in logits])
        if self.wants_logits:
            self.logits += (logits_BV,)
        if self.wants_scores:
            self.scores += (self.processors(self._seen, logits_BV.clone()),)  # type: ignore[arg-type]

    def _ends(self, tokens: list[int]) -> list[bool]:
        if self.distribution.custom_criteria:
            ends: list[bool] = self.criteria(self._seen, self.scores if self.wants_scores else None).tolist()
            return ends
        full = len(self.columns) >= self.distribution.max_new_tokens
        return [full or token in self.distribution.eos for token in tokens]

    def sequences(self) -> Tensor:
        """Return int64 [B, T + columns]: prompts with their padding, and the decoded tokens."""
        new = torch.tensor(self.columns, device=self._texts.device).T.reshape(len(self.ended), -1)
        return torch.cat([self.distribution.batch.ids_BT, new.to(self._texts.dtype)], 1)


def decode(llm: LLM, distribution: Distribution, lockstep: Lockstep, rows: int) -> tuple[Stats, ...]:
    """Decode a batch, at most `rows` of its rows at a time; the figures of each row."""
    prompts = distribution.batch.prompts
    shared = len(set(prompts)) < len(prompts)  # a prompt that occurs twice is read once
    decoder, give_back = llm.take_decoder(min(rows, len(prompts)), shared)
    requests = [distribution.request(row, lockstep.needs_logits) for row in range(len(prompts))]
    request_ids = [decoder.add(request) for request in requests]
    totals = [StepTotals() for _ in request_ids]
    failed: dict[int, EyasError] = {}
    while not lockstep.finished:
        for row, error in failed.items():
            if lockstep.waits_for(row):
                raise error
        assert not decoder.finished, "a row that is still wanted has no tokens left"
        for step in decoder.step():
            row = request_ids.index(step.request_id)
            totals[row].add(step)
            lockstep.feed(row, step)
            if step.error is not None:
                failed[row] = step.error
        for row in lockstep.advance():
            decoder.cancel(request_ids[row])
    # a decoder that reuses prefixes must not be kept: the weights may change before the next call
    if not shared:
        give_back()
    return tuple(Stats.from_totals(total, request) for total, request in zip(totals, requests, strict=True))
