"""The records of the engine's interface: a Request goes in, Steps come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from eyas.core.sampling import Processor, Sampling
from eyas.core.tree import Draft

__all__ = ["PlanLabel", "Request", "Step"]


class PlanLabel(Protocol):
    """An adaptive drafter's decision about one cycle, as far as statistics need it."""

    def label(self, row: int) -> str:
        """A name for what drafted this row."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt with its generation parameters."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    eos: frozenset[int] = frozenset()
    stop: Callable[[int], bool] | None = None  # called with every new token in order; True: the text ends with this token
    processors: tuple[Processor, ...] = ()  # logits processors; called once per node with the node's own prefix, which is slow


@dataclass(frozen=True)
class Step:
    """The result of one cycle, or of the prefill, for one row."""

    request: int  # the number that `Decoder.add` returned
    tokens: tuple[int, ...]  # emitted, cut at stop and length
    accepted: int  # how many of them are accepted draft tokens
    prefill: bool  # True: the step holds the first token, drawn from the logits of the prompt's last token
    finish: str | None  # "stop" | "length" in the last step of the request
    path: tuple[int, ...] = ()  # accepted nodes, root first, before the cut at stop and length
    draft: Draft | None = None  # the cycle's trees of all rows; this row's is number `row`
    row: int = 0
    seconds: float = 0.0  # of the whole cycle (all rows)
    parts: dict[str, float] = field(default_factory=dict)  # seconds by stage, on the host's clock
    ended_at: float = 0.0  # `time.perf_counter` seconds
    decision: PlanLabel | None = None  # an adaptive drafter's decision about this cycle

    @property
    def plan(self) -> str:
        """How this row was drafted: "fixed" (by the drafter's options), or the label of the decision, such as "plain" or "16/5/4"."""
        return "fixed" if self.decision is None else self.decision.label(self.row)
