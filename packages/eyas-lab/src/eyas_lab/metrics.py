"""Figures of speculative decoding. Symbols are the papers' (EAGLE-1, section 5, and Leviathan et al. 2023).
docs/guide/benchmark.md explains them at length. `eyas.core.totals` sums up steps.

cycle       one pass of the target over a draft tree. The prompt's own pass is not a cycle, and the token that it gives belongs to none.
emitted     tokens that a cycle hands out, the bonus token included, after cutting at EOS, stop strings and `max_new_tokens`
tau         emitted tokens / cycles
margin      distance of the two best scores at the first token where two texts differ: how near the tie was

n-alpha     acceptance by depth: of cycles whose first n draft tokens were accepted and that had drafted another one after them, the
            share that accepted it. A cycle that was cut at its n-th draft token says nothing about the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from eyas.core.adjustments import Adjustments
from eyas.core.cache import common_prefix
from eyas.core.engine import Request, Step
from eyas.core.rows import Row
from eyas.core.sampling import GumbelNoise, apply_sampling
from eyas.core.target import Target

__all__ = [
    "STAGES",
    "Cycle",
    "acceptance_by_depth",
    "cycle_of",
    "depth_counts",
    "first_difference",
    "margin",
    "n_alpha",
]

STAGES = ("draft", "target", "verify", "commit")


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
