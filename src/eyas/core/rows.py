"""The rows of a decoder: requests in flight, and the input of the next cycle made from them.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.cache import KVCache
from eyas.core.cycle import verify_output
from eyas.core.drafter import CycleInput
from eyas.core.features import RowFeature, TextEnd
from eyas.core.logprobs import width_for
from eyas.core.requests import Request, Step
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Cycle, Draft, TargetOutput, Tree
from eyas.core.verify import verify
from eyas.errors import EyasError, code_of_request
from eyas.timing import StageTimer

__all__ = ["Row", "RowSettings", "first_token_cycle", "make_cycle_input"]


@dataclass
class Row:
    """A request in flight."""

    request_id: int
    request: Request
    tokens: list[int]  # prompt and emitted tokens; the last one is the root of the next cycle
    # adjustments of `tokens`; `tokens_before_end` is filled in by `adjustments()`. None: the
    # request's distribution does not depend on the text
    penalty_state: Adjustments | None
    features: tuple[RowFeature, ...] = ()
    finish: str | None = None

    @classmethod
    def from_request(cls, request_id: int, request: Request, target: Target) -> Row:
        """Return the row of a request whose prompt is read."""
        adjustments = _adjustments(request, target.vocab_size, target.device)
        features = tuple(feature.open(request, target) for feature in request.features)
        return cls(request_id, request, list(request.prompt), adjustments, features)

    @property
    def emitted(self) -> int:
        """Number of emitted tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that the row may still emit."""
        return self.request.max_new_tokens - self.emitted

    @property
    def end(self) -> TextEnd:
        """Return the conditions that end the text from here on."""
        return TextEnd(self.request.eos, self.remaining, self.request.stops_after)

    def adjustments(self) -> Adjustments | None:
        """Return the adjustments of the text so far; None if the next tokens' distribution does not depend on it."""
        if self.penalty_state is None or self.penalty_state.end_tokens is None:
            return self.penalty_state
        missing = self.request.min_tokens - self.emitted
        if missing > 0:
            tokens_before_end = torch.tensor(missing, device=self.penalty_state.end_tokens.device)
            return replace(self.penalty_state, tokens_before_end=tokens_before_end)
        return replace(self.penalty_state, end_tokens=None) if self.request.sampling.has_adjustments else None

    def append(self, token: int) -> None:
        """Append an emitted token."""
        self.tokens.append(token)
        if self.penalty_state is not None:
            self.penalty_state.append(token)

    def emit(self, tokens: Sequence[int], failure: EyasError | None = None) -> tuple[tuple[int, ...], EyasError | None]:
        """Append tokens until one of them ends the text. No other function cuts the text.

        Args:
            failure: why no token can come after these; it counts where the text has not ended by then.

        Returns:
            the tokens that were appended, and why the request fails, if it does.
        """
        emitted = list[int]()
        for token in tokens:
            self.append(token)
            emitted.append(token)
            try:
                self.finish = self._ends_with(token)
            except EyasError as error:
                failure, self.finish = error, "error"
            if self.finish:
                break
        else:
            self.finish = None if failure is None else "error"
        return tuple(emitted), failure if self.finish == "error" else None

    def _ends_with(self, token: int) -> str | None:
        """Return why the text ends with its newest token; None if it goes on."""
        with code_of_request("stop"):
            stops = self.request.stop is not None and self.request.stop(token)
        for feature in self.features:
            stops = feature.accept(token) or stops
        if stops or token in self.request.eos:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def step(
        self, b: int, tokens: tuple[int, ...], timer: StageTimer, *, path: tuple[int, ...] = (), **step_fields: Any
    ) -> Step:
        """Return the Step in which this row, number `b`, emits these tokens. `step_fields`: further fields
        of the Step."""
        ended_at = timer.now()
        return Step(
            request_id=self.request_id,
            tokens=tokens,
            finish=self.finish,
            path=path,
            row=b,
            seconds=ended_at - timer.began,
            stage_seconds=dict(timer.stage_seconds),
            ended_at=ended_at,
            **step_fields,
        )

    def report(self, cycle: Cycle, number: int, tokens: Sequence[int], path: Sequence[int]) -> dict[str, Any]:
        """Return the reports of this row's features about the cycle, for `Step.extra`. `number`: the row's
        number in the cycle."""
        reports = (feature.report(cycle, number, tokens, path, self.finish) for feature in self.features)
        return {name: value for report in reports for name, value in report.items()}

    def fail(self, b: int, error: EyasError, timer: StageTimer, **step_fields: Any) -> Step:
        """Return the last Step of a request that fails."""
        self.finish = "error"
        return self.step(b, (), timer, error=error, **step_fields)


@dataclass(frozen=True)
class RowSettings:
    """The part of a cycle's input that stays the same until a request enters or leaves a row."""

    sampling: tuple[Sampling, ...]
    noise: GumbelNoise
    active_B: Tensor
    active_rows: tuple[int, ...]
    features: tuple[tuple[RowFeature, ...], ...]  # each row's; () if no row has any
    draft_limits: tuple[int | None, ...]  # each row's; () if no row has any
    top_tokens: int | None  # as in `CycleInput`

    @classmethod
    def from_rows(cls, rows: Sequence[Row | None], target: Target) -> RowSettings:
        """Return the settings of these rows, of which at least one is active.

        Empty rows are given the Sampling of an active one. Their results are ignored, and fewer
        combinations of Samplings mean fewer recorded CUDA graphs.
        """
        default = next(row for row in rows if row).request.sampling
        sampling = tuple(row.request.sampling if row else default for row in rows)
        features = tuple(row.features if row else () for row in rows)
        limits = tuple(row.request.draft_limit if row else None for row in rows)
        return cls(
            sampling=sampling,
            noise=target.runner.ops.noise(sampling, target.device),
            active_B=torch.tensor([row is not None for row in rows], device=target.device),
            active_rows=tuple(b for b, row in enumerate(rows) if row),
            features=features if any(features) else (),
            draft_limits=limits if any(limit is not None for limit in limits) else (),
            top_tokens=width_for((f.top_tokens for row_features in features for f in row_features), target.vocab_size),
        )


def make_cycle_input(
    rows: Sequence[Row | None],
    settings: RowSettings,
    tokens_B: Tensor,
    position_B: Tensor,
    max_position: int,
    target_cache: KVCache | None = None,
) -> CycleInput:
    """Return the input of the cycle whose roots are `tokens_B` at `position_B`."""
    return CycleInput(
        tokens_B=tokens_B,
        position_B=position_B,
        active_B=settings.active_B,
        sampling=settings.sampling,
        noise=settings.noise,
        max_position=max_position,
        adjustments=Adjustments.stack([row.adjustments() if row else None for row in rows]),
        active_rows=settings.active_rows,
        row_tokens=tuple(row.tokens if row else () for row in rows),
        features=settings.features,
        ends=tuple(row.end if row else TextEnd() for row in rows),
        draft_limits=settings.draft_limits,
        top_tokens=settings.top_tokens,
        target_cache=target_cache,
    )


def first_token_cycle(row: Row, logits_V: Tensor, target: Target) -> Cycle:
    """Return the cycle whose tree is the prompt's last token alone: it draws the first token from the
    logits that the prefill returns."""
    position = len(row.tokens) - 1
    token_1, position_1 = (torch.tensor([number], device=target.device) for number in (row.tokens[-1], position))
    first_input = make_cycle_input([row], RowSettings.from_rows([row], target), token_1, position_1, position)
    root = Draft(Tree.chain(1, 1, target.device), token_1[:, None])
    output = TargetOutput(logits_V[None, None], logits_V.new_empty(1, 1, 0))
    return verify_output(root, output, first_input, verify, target.runner.ops)


def _adjustments(request: Request, vocab: int, device: torch.device) -> Adjustments | None:
    """Return the adjustments [V] of the prompt; None if the request's distribution does not depend on the text."""
    sampling, ends = request.sampling, list(request.eos)
    if not sampling.has_adjustments and not (request.min_tokens and ends):
        return None

    def zeros(dtype: torch.dtype, wanted: bool) -> Tensor | None:
        return torch.zeros(vocab, dtype=dtype, device=device) if wanted else None

    seen_tokens = zeros(torch.bool, sampling.repetition_penalty != 1.0)
    counts = zeros(torch.float32, bool(sampling.presence_penalty or sampling.frequency_penalty))
    bias = zeros(torch.float32, bool(sampling.logit_bias))
    end_tokens = zeros(torch.bool, bool(request.min_tokens and ends))
    if seen_tokens is not None:
        seen_tokens[list(request.prompt)] = True
    if bias is not None:
        for token, value in sampling.logit_bias:
            bias[token] += value
    if end_tokens is not None:
        end_tokens[ends] = True
    return Adjustments(seen_tokens, counts, bias, end_tokens)
