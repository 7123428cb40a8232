"""Figures of speculative decoding: one fold over Steps, and what is computed from its counts.

Symbols are the papers' (EAGLE-1, section 5; Leviathan et al. 2023). docs/guide/benchmark.md explains them
at length.

    cycle       one pass of the target over a draft tree. The prompt's own pass is not a cycle, and the token that it gives belongs to none.
    emitted     tokens that a cycle hands out, the bonus token included, after cutting at EOS, stop strings and `max_new_tokens`
    tau         emitted tokens / cycles
    mean acceptance length
                1 + accepted draft tokens / drafts, counted before cutting, over cycles that verified a draft. Engines such as vLLM report
                this. It is tau, but for the cut last cycle of each answer and for cycles without a draft.
    n-alpha     acceptance by depth: of cycles whose first n draft tokens were accepted and that had drafted another one after them, the
                share that accepted it. A cycle that was cut at its n-th draft token says nothing about the next one.
    c           seconds of a cycle / seconds of a step of plain decoding
    speed-up    tokens per second / those of plain decoding on the same prompts, = tau / c
    margin      distance of the two best scores at the first token where two texts differ: how near the tie was

Intervals are 95 %, by the bootstrap over samples (prompts, chats, rounds), paired: all columns of
one sample are drawn together. This module knows no method, no tokenizer and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from eyas.core.adjustments import Adjustments
from eyas.core.cache import common_prefix
from eyas.core.engine import Request, Step
from eyas.core.rows import Row
from eyas.core.sampling import GumbelNoise, apply_sampling
from eyas.core.target import Target
from eyas.core.totals import StepTotals, tau, tokens_per_second

__all__ = [
    "Cycle",
    "Interval",
    "StepTotals",
    "acceptance_by_depth",
    "bootstrap",
    "cycle_of",
    "depth_counts",
    "difference_of_ratios",
    "first_difference",
    "margin",
    "mean_acceptance_length",
    "n_alpha",
    "ratio",
    "ratio_of_ratios",
    "relative_cycle_cost",
    "tau",
    "tokens_per_second",
]

Interval = tuple[float, float | None, float | None]  # (value, low, high)
STAGES = ("draft", "target", "verify", "commit")
RESAMPLES = 2000


# --- ratios ------------------------------------------------------------------------------------------


def relative_cycle_cost(seconds: float, cycles: float, plain_seconds: float, plain_cycles: float) -> float | None:
    """Return c, the seconds of a cycle over seconds of a step of plain decoding; None without either."""
    return (seconds / cycles) / (plain_seconds / plain_cycles) if cycles and plain_seconds and plain_cycles else None


# --- one cycle -------------------------------------------------------------------------------------


class Cycle(NamedTuple):
    """One cycle of one row as numbers. None where a library does not report it."""

    emitted: int  # tokens, after cutting
    accepted: int  # draft tokens among them
    seconds: float  # time from the end of the cycle before to the end of this one, by the host's clock
    nodes: int | None = None  # verified, the root and padding included
    candidates: int | None = None  # draft tokens that could have been accepted
    tested: int | None = None  # accepted ones, and one more where a draft token after them was refused
    draft: float | None = None  # seconds by stage, by the host's clock
    target: float | None = None
    verify: float | None = None
    commit: float | None = None
    accepted_uncut: int | None = None  # draft tokens that verification accepted, before cutting


def cycle_of(step: Step, seconds: float | None = None) -> Cycle:
    """Return the numbers of a cycle's Step.

    Args:
        seconds: default: the Step's own.

    A cycle that was cut at an accepted token tests nothing after it.
    """
    assert step.draft is not None
    tree = step.draft.tree
    candidate_N, parent_N = tree.acceptable_BN[step.row], tree.parents_BN[step.row]
    has_child = bool((candidate_N & (parent_N == step.path[step.accepted])).any())
    refused = has_child and len(step.tokens) > step.accepted
    return Cycle(
        emitted=len(step.tokens),
        accepted=step.accepted,
        seconds=step.seconds if seconds is None else seconds,
        nodes=candidate_N.numel(),
        candidates=int(candidate_N.sum()) - 1,
        tested=step.accepted + refused,
        accepted_uncut=len(step.path) - 1,
        **{name: step.stage_seconds.get(name) for name in STAGES},
    )


def depth_counts(cycles: Iterable[Cycle], depth: int) -> list[tuple[int, int]]:
    """Return (cycles that tested the (n+1)-th draft token, cycles that accepted it) for n = 0..depth-1."""
    tested, accepted = [0] * depth, [0] * depth
    for cycle in cycles:
        for n in range(min(cycle.tested or 0, depth)):
            tested[n] += 1
            accepted[n] += n < cycle.accepted
    return list(zip(tested, accepted, strict=True))


def acceptance_by_depth(cycles: Iterable[Cycle], depth: int) -> list[float | None]:
    """Return the acceptance of the (n+1)-th draft token, given that n were accepted, n = 0..depth-1; None where no
    cycle got there.

    Of chains this is n-alpha (EAGLE-1, section 5).
    """
    return [accepted / tested if tested else None for tested, accepted in depth_counts(cycles, depth)]


def n_alpha(cycles: Iterable[Cycle], depth: int) -> dict[str, float]:
    """Return {"0-alpha": ..., "1-alpha": ...} of cycles that drafted chains, as deep as they got."""
    rates = acceptance_by_depth(cycles, depth)
    return {f"{n}-alpha": rate for n, rate in enumerate(rates) if rate is not None}


def mean_acceptance_length(cycles: Iterable[Cycle]) -> float | None:
    """Return 1 + accepted draft tokens / drafts, counted before cutting (vLLM's figure); None where nothing was
    drafted."""
    accepted = [cycle.accepted_uncut for cycle in cycles if cycle.candidates and cycle.accepted_uncut is not None]
    return 1 + sum(accepted) / len(accepted) if accepted else None


# --- intervals ---------------------------------------------------------------------------------------


def ratio(over: Any, under: Any) -> Any:
    """Return a ratio of sums: a statistic for `bootstrap`."""
    return np.asarray(over) / np.asarray(under)


def ratio_of_ratios(over: Any, under: Any, base_over: Any, base_under: Any) -> Any:
    """Return a ratio of sums over a baseline's ratio, for `bootstrap`: for example a speed-up."""
    return ratio(over, under) / ratio(base_over, base_under)


def difference_of_ratios(over: Any, under: Any, base_over: Any, base_under: Any) -> Any:
    """Return a ratio of sums less a baseline's ratio, for `bootstrap`: for example a
    difference of taus."""
    return ratio(over, under) - ratio(base_over, base_under)


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


# --- texts -------------------------------------------------------------------------------------------


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or at which the shorter text ends; None for equal texts."""
    same = common_prefix(one, other)
    return None if same == len(one) == len(other) else same


@torch.inference_mode()
def margin(target: Target, request: Request, prefix: Sequence[int]) -> float | None:
    """Return the distance of the two best scores for the token that follows `prefix`, the request's noise included.

    Args:
        prefix: new tokens of the answer, all before the token in question.

    Returns:
        log-probabilities' (sampled) or logits' (greedy) difference; None where sampling allows a
        single token.
    """
    sampling, session = request.sampling, target.open(1)
    ids = [*request.prompt, *prefix]
    session.reserve(len(ids))
    row = Row.from_request(0, request, target)
    for token in prefix:
        row.append(token)
    scores_1V = apply_sampling(session.prefill(0, ids)[None], sampling, Adjustments.stack([row.adjustments()]))
    if not sampling.greedy:
        position_11 = torch.tensor([[len(ids)]], device=scores_1V.device)
        noise = GumbelNoise.from_sampling([sampling], scores_1V.device)
        scores_1V = scores_1V.log_softmax(-1) + noise.gumbel(position_11, scores_1V.shape[-1])[:, 0]
    best, second = scores_1V[0].topk(2).values.tolist()
    return float(best - second) if math.isfinite(second) else None
