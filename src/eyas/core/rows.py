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

__all__ = ["Row", "RowSettings", "cycle_input", "token_history"]


@dataclass
class Row:
    """A request in flight."""

    ticket: int
    request: Request
    tokens: list[int]  # prompt and emitted tokens; the last one is the root of the next cycle
    history_V: Tensor | None  # bool, tokens that occur in `tokens`; None without a repetition penalty
    finish: str | None = None

    @property
    def remaining(self) -> int:
        """Tokens that the row may still emit."""
        return self.request.max_new_tokens - (len(self.tokens) - len(self.request.prompt))


@dataclass(frozen=True)
class RowSettings:
    """The part of a cycle's input that stays the same until a request enters or leaves a row."""

    sampling: tuple[Sampling, ...]
    noise: GumbelNoise
    active_B: Tensor
    active_rows: tuple[int, ...]
    processors: tuple[tuple[Processor, ...], ...]  # () if no row has any
    eos: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, rows: Sequence[Row | None], target: Target) -> RowSettings:
        """The settings of these rows, of which at least one is active.

        Empty rows are given the Sampling of an active one. Their results are ignored, and fewer combinations of Samplings mean fewer
        recorded CUDA graphs.
        """
        default = next(row for row in rows if row).request.sampling
        sampling = tuple(row.request.sampling if row else default for row in rows)
        processors = tuple(row.request.processors if row else () for row in rows)
        return cls(
            sampling=sampling,
            noise=target.run.ops.noise(sampling, target.device),
            active_B=torch.tensor([row is not None for row in rows], device=target.device),
            active_rows=tuple(b for b, row in enumerate(rows) if row),
            processors=processors if any(processors) else (),
            eos=tuple(row.request.eos if row else frozenset() for row in rows),
        )


def cycle_input(rows: Sequence[Row | None], settings: RowSettings, tokens_B: Tensor, position_B: Tensor, max_position: int) -> CycleInput:
    """The input of the cycle whose roots are `tokens_B` at `position_B`."""
    return CycleInput(
        tokens_B=tokens_B,
        position_B=position_B,
        active_B=settings.active_B,
        sampling=settings.sampling,
        noise=settings.noise,
        max_position=max_position,
        history_BV=_stacked([row.history_V if row else None for row in rows]),
        active_rows=settings.active_rows,
        row_tokens=tuple(row.tokens if row else () for row in rows),
        processors=settings.processors,
        eos=settings.eos,
        remaining=tuple(row.remaining if row else 0 for row in rows),
    )


def token_history(request: Request, target: Target) -> Tensor | None:
    """bool [V]: which tokens occur in the prompt; None without a repetition penalty."""
    if request.sampling.repetition_penalty == 1.0:
        return None
    history_V = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
    history_V[list(request.prompt)] = True
    return history_V


def _stacked(histories: Sequence[Tensor | None]) -> Tensor | None:
    """bool [B, V]; None if no row has a repetition penalty."""
    first_V = next((history_V for history_V in histories if history_V is not None), None)
    if first_V is None:
        return None
    return torch.stack([torch.zeros_like(first_V) if history_V is None else history_V for history_V in histories])
