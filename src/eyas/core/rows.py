"""The rows of a decoder: requests in flight, and the input of the next cycle made from them.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput
from eyas.core.requests import Request
from eyas.core.sampling import GumbelNoise, Processor, Sampling
from eyas.core.target import Target

__all__ = ["Batch", "Row", "cycle_input", "token_history"]


@dataclass
class Row:
    """A request in flight."""

    ticket: int
    request: Request
    tokens: list[int]  # prompt and everything emitted; the last one is the root of the next cycle
    history_V: Tensor | None  # bool, tokens in the row; only with a repetition penalty
    finish: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens that the row may still get."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))


@dataclass(frozen=True)
class Batch:
    """The part of a cycle's input that stays the same as long as no row changes hands."""

    sampling: tuple[Sampling, ...]
    noise: GumbelNoise
    active_B: Tensor
    active_rows: tuple[int, ...]
    processors: tuple[tuple[Processor, ...], ...]  # empty where no row has any
    eos: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, rows: Sequence[Row | None], target: Target) -> Batch:
        """The batch of these rows, of which at least one is busy. Empty rows are given a busy one's Sampling: what they compute is
        ignored, and recordings for fewer combinations are needed."""
        idle = next(row for row in rows if row).request.sampling
        sampling = tuple(row.request.sampling if row else idle for row in rows)
        processors = tuple(row.request.processors if row else () for row in rows)
        return cls(
            sampling=sampling,
            noise=target.run.ops.noise(sampling, target.device),
            active_B=torch.tensor([row is not None for row in rows], device=target.device),
            active_rows=tuple(b for b, row in enumerate(rows) if row),
            processors=processors if any(processors) else (),
            eos=tuple(row.request.eos if row else frozenset() for row in rows),
        )


def cycle_input(rows: Sequence[Row | None], batch: Batch, tokens_B: Tensor, position_B: Tensor, max_position: int) -> CycleInput:
    """The input of a cycle whose roots are these tokens at these positions."""
    return CycleInput(
        tokens_B=tokens_B,
        position_B=position_B,
        active_B=batch.active_B,
        sampling=batch.sampling,
        noise=batch.noise,
        max_position=max_position,
        history_BV=_stacked([row.history_V if row else None for row in rows]),
        active_rows=batch.active_rows,
        row_tokens=tuple(row.tokens if row else () for row in rows),
        processors=batch.processors,
        eos=batch.eos,
        remaining=tuple(row.remaining if row else 0 for row in rows),
    )


def token_history(request: Request, target: Target) -> Tensor | None:
    """bool [V]: the tokens of the prompt, where a repetition penalty needs to know them."""
    if request.sampling.repetition_penalty == 1.0:
        return None
    history_V = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
    history_V[list(request.prompt)] = True
    return history_V


def _stacked(histories: Sequence[Tensor | None]) -> Tensor | None:
    """bool [B, V]; None where no row has a repetition penalty."""
    known = next((history_V for history_V in histories if history_V is not None), None)
    if known is None:
        return None
    return torch.stack([torch.zeros_like(known) if history_V is None else history_V for history_V in histories])
