"""Checks of option values, and options that several methods have."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated

from eyas.core.options import TRAINING
from eyas.core.params import is_number, is_whole
from eyas.errors import OptionError, near

__all__ = ["OBJECTIVES", "SelfTraining", "check_choice", "check_decay", "check_number", "check_weight", "check_whole"]

OBJECTIVES = ("distribution", "acceptance", "hybrid")  # of eyas_train.losses


def check_whole(group: str, least: int, **values: object) -> None:
    """Raise OptionError unless the value is a whole number, `least` or more. `group` may be empty."""
    for name, value in values.items():
        if not is_whole(value) or value < least:
            option = f"{group}.{name}" if group else name
            raise OptionError(f"{option} must be a whole number, {least} or more, got {value!r}")


def check_number(option: str, value: object, is_allowed: Callable[[float], bool], allowed: str) -> None:
    """Raise OptionError unless the value is an allowed number; `allowed` names the allowed ones."""
    if not is_number(value) or not is_allowed(value):
        raise OptionError(f"{option} must be {allowed}, got {value!r}")


def check_decay(option: str, decay: object) -> None:
    """Raise OptionError unless powers of the value can be weights."""
    check_number(option, decay, lambda number: 0 < number <= 1, "above 0 and at most 1")


def check_weight(option: str, weight: object) -> None:
    """Raise OptionError unless the value can be the weight of a part of a loss."""
    check_number(option, weight, lambda number: 0 <= number < math.inf, "0 or more")


def check_choice(option: str, value: object, known: Collection[object]) -> None:
    """Raise OptionError, with the nearest names, for a value that is not one of `known`."""
    if value not in known:
        raise OptionError(f"unknown {option} {value!r}; {near(str(value), list(map(str, known)))}")


@dataclass(frozen=True)
class SelfTraining:
    """How a net is trained on its own outputs: the training-time test (EAGLE-3, section 3.2)."""

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
