"""The two records at the engine's door: a Request goes in, Steps come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from eyas.core.sampling import Processor, Sampling
from eyas.core.tree import Draft

__all__ = ["PlanLabel", "Request", "Step"]


class PlanLabel(Protocol):
    """What an adaptive drafter decided for one cycle; the engine needs no more of it than a label for statistics."""

    def label(self, row: int) -> str:
        """What drafted this row."""
        ...


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[int], bool] | None = None  # called with every new token in order; True = this one ends the text
    processors: tuple[Processor, ...] = ()  # run once per node with that node's own prefix: slow


@dataclass(frozen=True)
class Step:
    """What one cycle did for one row."""

    request: int  # the number that `Decoder.add` returned
    tokens: tuple[int, ...]  # emitted, cut at stop and length
    accepted: int  # how many of them were drafted
    prefill: bool  # the first token, which comes from the prompt's own pass
    finish: str | None  # "stop" | "length" when this was the last step of the request
    path: tuple[int, ...] = ()  # accepted nodes, root first, before cutting
    draft: Draft | None = None  # the whole cycle's tree; this row is draft[row]
    row: int = 0
    seconds: float = 0.0  # of the whole cycle (all rows)
    parts: dict[str, float] = field(default_factory=dict)  # seconds by stage, on the host's clock
    ended_at: float = 0.0  # `time.perf_counter` seconds
    decision: PlanLabel | None = None  # of a drafter that adapts, before the cycle

    @property
    def plan(self) -> str:
        """What drafted this row: "fixed" (the drafter's own options), or the label of the decision, such as "plain" or "16/5/4"."""
        return "fixed" if self.decision is None else self.decision.label(self.row)
