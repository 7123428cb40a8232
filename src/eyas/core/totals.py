"""One sum over the Steps of any number of requests, and the two figures that every answer has; `eyas_lab.metrics` has others."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from eyas.core.requests import Step

__all__ = ["StepTotals", "tau", "tokens_per_second"]


def tau(emitted: float, cycles: float) -> float:
    """Return the tokens that a cycle emits; 0 without cycles."""
    return emitted / cycles if cycles else 0.0


def tokens_per_second(tokens: float, seconds: float) -> float:
    """Return tokens per second; 0 where no time passed."""
    return tokens / seconds if tokens and seconds > 0 else 0.0


@dataclass
class StepTotals:
    """Running totals over the Steps of any number of requests. `add` each Step in the order in
    which the engine returns them."""

    token_ids: list[int] = field(default_factory=list)  # every new token, the prompt's own included
    accepted_lengths: list[int] = field(default_factory=list)  # draft tokens that each cycle emitted
    emitted: int = 0  # tokens of cycles
    decisions: Counter[str] = field(default_factory=Counter)  # cycles by `Step.drafted_by`
    predicted_tokens: int = 0  # accepted tokens of predictions
    cached_tokens: int = 0  # prompt tokens that were not read again
    prefill_seconds: float = 0.0
    started_at: float = math.nan  # the host's clock; NaN before the first Step
    ended_at: float = math.nan
    finish: str | None = None  # finish reason of the last Step

    def add(self, step: Step) -> None:
        """Count one Step."""
        self.token_ids += step.tokens
        self.predicted_tokens += step.extra.get("predicted", 0)
        self.cached_tokens += step.cached_tokens
        self.ended_at, self.finish = step.ended_at, step.finish
        if math.isnan(self.started_at):
            self.started_at = step.ended_at - step.seconds
        if step.prefill:
            self.prefill_seconds += step.seconds
        else:
            self.accepted_lengths.append(step.accepted)
            self.emitted += len(step.tokens)
            self.decisions[step.drafted_by] += 1

    @property
    def cycles(self) -> int:
        """Passes of the target over a draft tree."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Emitted tokens per cycle; 0 without cycles."""
        return tau(self.emitted, self.cycles)

    @property
    def seconds(self) -> float:
        """From the beginning of the first Step to the end of the last one; 0 without Steps."""
        return 0.0 if math.isnan(self.started_at) else self.ended_at - self.started_at
