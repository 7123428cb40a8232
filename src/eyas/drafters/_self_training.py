"""Options of the training of a net on its own outputs: the training-time test (EAGLE-3, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from eyas.core.options import TRAINING
from eyas.drafters._options import check_choice, check_decay, check_whole

__all__ = ["OBJECTIVES", "SelfTraining"]

OBJECTIVES = ("distribution", "acceptance", "hybrid")  # of eyas_train.objectives


@dataclass(frozen=True)
class SelfTraining:
    """How a net is trained on its own outputs."""

    steps: Annotated[int, TRAINING] = 4
    """Steps of the training-time test: draft tokens predicted one after another from each slot."""
    decay: Annotated[float, TRAINING] = 0.8
    """Step i weighs decay ** i."""
    objective: Annotated[str, TRAINING] = "distribution"
    """distribution: cross-entropy with the target's distribution; acceptance, hybrid: LK losses,
    which train the probability that a drawn token is accepted."""

    def __post_init__(self) -> None:
        check_whole("ttt", 1, steps=self.steps)
        check_decay("ttt.decay", self.decay)
        check_choice("ttt.objective", self.objective, OBJECTIVES)
