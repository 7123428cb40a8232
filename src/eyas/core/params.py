"""How the tokens of a request are drawn: the one declaration of the sampling parameters.

Python's keywords, the command line's flags and the fields of the server's bodies are made from the fields of
`Sampling`. They take names, types and defaults from them; the command line also takes the docstrings as help.
`core.sampling` has the arithmetic. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeGuard

from eyas.errors import OptionError

__all__ = ["Sampling", "is_number", "is_whole"]


@dataclass(frozen=True, repr=False)
class Sampling:
    """How one request draws its tokens. Raise OptionError for impossible values.

    Attributes:
        temperature: 0 = greedy; divides the logits.
        top_k: keep the k most probable tokens; 0 = all.
        top_p: keep the most probable tokens that together hold this mass; 1 = all.
        min_p: drop tokens less probable than this share of the most probable one; 0 = none.
        repetition_penalty: divides positive logits of tokens in the text; 1 = off.
        presence_penalty: subtracted from the logits of tokens in the answer; -2 to 2, 0 = off.
        frequency_penalty: subtracted once for each time that a token is in the answer; -2 to 2, 0 = off.
        logit_bias: (token id, number from -100 to 100) pairs, added to the raw logits; -100 is
            nearly a ban.
        seed: same seed, same prompt, same text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        def require(good: bool, what: str) -> None:
            if not good:
                raise OptionError(what)

        require(
            is_number(self.temperature) and self.temperature >= 0,
            f"temperature must be 0 or more, got {self.temperature}",
        )
        require(
            is_whole(self.top_k) and self.top_k >= 0, f"top_k must be a whole number, 0 (off) or more, got {self.top_k}"
        )
        require(is_number(self.top_p) and 0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, f"min_p must be from 0 to 1, got {self.min_p}")
        require(
            is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty must be above 0 (1 = off), got {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(is_number(value) and -2 <= value <= 2, f"{name} must be from -2 to 2 (0 = off), got {value}")
        for token, bias in self.logit_bias:
            require(is_whole(token) and token >= 0, f"logit_bias: {token!r} is not a token id")
            require(
                is_number(bias) and -100 <= bias <= 100,
                f"logit_bias: the bias of token {token} must be from -100 to 100, got {bias}",
            )
        require(
            is_whole(self.seed) and 0 <= self.seed < 2**63,
            f"seed must be a whole number from 0 to 2^63 - 1, got {self.seed}",
        )

    def __repr__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Sampling({', '.join(changed)})"

    @property
    def has_adjustments(self) -> bool:
        """Whether penalties or a logit bias change the logits (`core.adjustments`)."""
        return self.repetition_penalty != 1.0 or bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias
        )

    @property
    def is_raw_softmax(self) -> bool:
        """Whether temperature and filters change nothing (temperature 1, no top-k, top-p or min-p)."""
        return self.temperature == 1.0 and not self.has_filters

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def greedy(self) -> bool:
        """Whether the row decodes greedily. Temperatures below 1e-5 count as 0, because dividing by
        them would overflow float32."""
        return self.temperature < 1e-5


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is an int or a finite float; a bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether the value is an int; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)
