"""The number formats of linear layers and of caches, and numbers of threads: words that runners,
targets and kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["EXACT", "ThreadCount", "WeightFormat"]

ThreadCount = int | Callable[[], int] | None
"""A number of threads, a function that returns it, or None for torch's number."""


@dataclass(frozen=True)
class WeightFormat:
    """The number formats in which linear layers are stored and multiplied, and in which keys and
    values are stored; all other operations are in float32.

    Attributes:
        weights: "exact": the narrowest format that holds them without loss, which is int8 with a scale
            per output, bfloat16 or float32. "int8", "bfloat16": rounded to that. "int4": rounded,
            with a scale for every 32 inputs of an output (int8 where the number of inputs is not a multiple of 32).
        activations: the inputs of linear layers. "exact": as exact as float32. "bfloat16" (bfloat16
            weights only) takes a third to a half of the arithmetic. "int16" and "int8" (int8 and int4
            weights only) are multiples of 1/32,639 or 1/127 of each token's largest value and take two
            thirds or a third of it. Where the processor lacks the instructions, they stay float32.
        kv: keys and values of the cache. "exact": in the model's dtype; "bfloat16": rounded to that. "int8" has multiples of
            1/127 of the largest number of each head's key or value.
    """

    weights: Literal["exact", "bfloat16", "int8", "int4"] = "exact"
    activations: Literal["exact", "bfloat16", "int16", "int8"] = "exact"
    kv: Literal["exact", "bfloat16", "int8"] = "exact"

    @property
    def exact(self) -> bool:
        """Whether the results are the model's own, up to float32 rounding."""
        return self.weights == self.activations == self.kv == "exact"


EXACT = WeightFormat()
