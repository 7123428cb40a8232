"""Costs, ratios of figures of `eyas_lab.metrics`, and their intervals.

    c           seconds of a cycle / seconds of a step of plain decoding
    speed-up    tokens per second / plain decoding's tokens per second on the same prompts, = tau / c
    mean acceptance length
                1 + accepted draft tokens / drafts, counted before cutting, over cycles that verified a draft. Engines such as vLLM report
                this. It is tau, but for the cut last cycle of each answer and for cycles without a draft.

Intervals are 95 %, by the bootstrap over samples (prompts, chats, rounds), paired: all columns of
one sample are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eyas_lab.metrics import Cycle

__all__ = [
    "RESAMPLES", "Interval", "bootstrap", "mean_acceptance_length", "ratio", "ratio_of_ratios", "relative_cycle_cost",
]  # fmt: skip

Interval = tuple[float, float | None, float | None]  # (value, low, high)
RESAMPLES = 2000


def relative_cycle_cost(seconds: float, cycles: float, plain_seconds: float, plain_cycles: float) -> float | None:
    """Return c, the seconds of a cycle over seconds of a step of plain decoding; None without either."""
    return (seconds / cycles) / (plain_seconds / plain_cycles) if cycles and plain_seconds and plain_cycles else None


def mean_acceptance_length(cycles: Iterable[Cycle]) -> float | None:
    """Return 1 + accepted draft tokens / drafts, counted before cutting (vLLM's figure); None where nothing was
    drafted."""
    accepted = [cycle.accepted_uncut for cycle in cycles if cycle.candidates and cycle.accepted_uncut is not None]
    return 1 + sum(accepted) / len(accepted) if accepted else None


def ratio(over: Any, under: Any) -> Any:
    """Return a ratio of sums: a statistic for `bootstrap`."""
    return np.asarray(over) / np.asarray(under)


def ratio_of_ratios(over: Any, under: Any, base_over: Any, base_under: Any) -> Any:
    """Return a ratio of sums over a baseline's ratio, for `bootstrap`: for example a speed-up."""
    return ratio(over, under) / ratio(base_over, base_under)


def bootstrap(
    statistic: Callable[..., Any], *columns: Sequence[float] | np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """Return a statistic of sums over samples, with its 95 % percentile interval (Efron 1979).

    Samples are drawn with replacement, all columns together. The draws depend on the number of
    samples and the seed alone, so that figures of the same samples may be compared draw by draw.

    Args:
        statistic: takes the sum of each column (a number, or an array of one sum for each
            resample), for example `ratio`.
        columns: one number for each sample. A sample that is zero in every column is left out.

    Returns:
        (value, low, high), without low and high for a single sample; None where the value is
        undefined (0 / 0).
    """
    table_CN = np.array(columns, dtype=float)
    table_CN = table_CN[:, (table_CN != 0).any(axis=0)]
    samples = table_CN.shape[1]
    if not samples:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*table_CN.sum(axis=1)))
        if not math.isfinite(value):
            return None
        if samples == 1:
            return value, None, None
        counts_RN = np.random.default_rng(seed).multinomial(samples, np.full(samples, 1 / samples), size=resamples)
        drawn_R = np.asarray(statistic(*(table_CN @ counts_RN.T)))
    low, high = np.percentile(drawn_R[np.isfinite(drawn_R)], [2.5, 97.5])
    return value, float(low), float(high)
