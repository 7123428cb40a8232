"""Cycles as numbers, and acceptance by depth. Symbols are the papers' (EAGLE-1, section 5); `eyas.metrics` has the others.

n-alpha     acceptance by depth: of cycles whose first n draft tokens were accepted and that had drafted another one after them, the
            share that accepted it. A cycle that was cut at its n-th draft token says nothing about the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from eyas.core.engine import Step

__all__ = ["STAGES", "Cycle", "acceptance_by_depth", "cycle_of", "depth_counts", "n_alpha"]

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
