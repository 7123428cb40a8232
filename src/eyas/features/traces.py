"""Two features that show the work of a cycle.

    Traced      `Step.extra["trace"]`, a `Trace` for display: the row's tree with probabilities, the accepted path,
                and why it ended; no entry for the first token, and none where the request failed
    RawLogits   `Step.extra["logits"]`, float32 [tokens, V]: the raw logits from which each of the tokens was drawn

Cycles are not recorded while a row has one of them. This module knows no method. Letters: N nodes, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.core.features import RowFeature
from eyas.core.requests import Request, RequestFeature
from eyas.core.target import Target
from eyas.core.tree import Cycle, Draft

__all__ = ["RawLogits", "Trace", "TraceNode", "Traced", "trace_of"]


@dataclass(frozen=True)
class TraceNode:
    """A node of a verified tree, in plain numbers."""

    parent: int  # -1 for the root, which comes first
    token: int
    depth: int
    # the draft's probability of the token after its parent; None if the method has none, and for
    # the root
    q: float | None
    p: float  # the target's probability of it, after penalties, masks and temperature (greedy rows: temperature 1); 1 for the root
    accepted: bool


@dataclass(frozen=True)
class Trace:
    """One cycle of one row, for display. Only acceptable nodes are listed."""

    nodes: tuple[TraceNode, ...]
    path: tuple[int, ...]  # indices of the accepted nodes, root first, before the cut at stop and length
    bonus: int  # the target's own token after the path
    ended: str
    """Why the path ended: "no child" (its last node is a leaf), "other token" (the target drew a
    token that no child has), or "stop" or "length" (the answer ended)."""


class _Reader(RequestFeature, RowFeature):
    """A feature that only reads cycles: it has no state, so it serves every row itself."""

    reads_cycle = True

    def open(self, request: Request, target: Target) -> RowFeature:
        return self


class Traced(_Reader):
    """Reports the `Trace` of every cycle."""

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        if not path or finish == "error":
            return {}
        bonus = int(cycle.verdict.bonus_B[row])
        return {"trace": trace_of(cycle.draft, row, cycle.scores_BNV[row].float(), path, bonus, finish)}


class RawLogits(_Reader):
    """Reports the raw logits of the tokens of every Step."""

    def report(
        self, cycle: Cycle, row: int, tokens: Sequence[int], path: Sequence[int], finish: str | None
    ) -> Mapping[str, Any]:
        return {"logits": cycle.output.logits_BNV[row, list(path or (0,))[: len(tokens)]].float()}


def trace_of(draft: Draft, row: int, scores_NV: Tensor, path: Sequence[int], bonus: int, finish: str | None) -> Trace:
    """Return the trace of a row of a verified draft.

    Args:
        scores_NV: the target's scores; their softmax is p.
        path: accepted nodes, root first.
        finish: why the answer ended in this cycle; None if it continues.
    """
    tree = draft.tree
    parents_N, tokens_N = tree.parents_BN[row], draft.tokens_BN[row]
    p_N = scores_NV.softmax(-1)[parents_N.clamp(min=0), tokens_N]
    log_q_N = torch.full_like(p_N, torch.nan) if draft.log_q_BN is None else draft.log_q_BN[row]
    numbers = torch.stack(
        [parents_N.double(), tokens_N.double(), tree.depth_BN[row].double(), log_q_N.exp().double(), p_N.double()]
    )
    acceptable = tree.acceptable_BN[row].tolist()
    place: dict[int, int] = {}  # node -> its index among those listed
    nodes = list[TraceNode]()
    for n, (parent, token, depth, q, p) in enumerate(numbers.T.tolist()):
        if n == 0:
            nodes.append(TraceNode(-1, int(token), 0, None, 1.0, True))
        elif acceptable[n] and int(parent) in place:
            nodes.append(TraceNode(place[int(parent)], int(token), int(depth), None if q != q else q, p, n in path))
        else:
            continue
        place[n] = len(nodes) - 1
    listed = tuple(place[n] for n in path)
    ended = finish or ("other token" if any(node.parent == listed[-1] for node in nodes) else "no child")
    return Trace(tuple(nodes), listed, bonus, ended)
