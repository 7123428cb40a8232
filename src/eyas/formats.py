"""The number formats of linear layers, and numbers of threads: words that runners, targets and
kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["EXACT", "ThreadCount", "WeightFormat"]

ThreadCount = int | Callable[[], int] | None
"""A number of threads, a function that returns it, or None for torch's number."""


@dataclass(frozen=True)
class WeightFormat:
    """The number formats in which linear layers are stored and multiplied; all other operations are
    in float32.

    weights: exact: the narrowest format without loss, which is int8 with a scale per output,
    bfloat16 or float32. int8, bfloat16:
        rounded to that. int4: rounded, with a scale for every 32 inputs of an output (int8 where inputs are no multiple of 32).
    activations: the inputs of linear layers, where the processor multiplies them (elsewhere they
    stay float32). exact: as exact
        as float32. For bfloat16 weights: bfloat16, with a third to a half of the arithmetic. For int8 and int4 weights: int16 or
        int8, which are multiples of 1/32,639 or 1/127 of each token's largest value, with two thirds or a third of the arithmetic.
    """

    weights: Literal["exact", "bfloat16", "int8", "int4"] = "exact"
    activations: Literal["exact", "bfloat16", "int16", "int8"] = "exact"

    @property
    def exact(self) -> bool:
        """Whether the results are the model's own, up to float32 rounding."""
        return self.weights == self.activations == "exact"


EXACT = WeightFormat()
