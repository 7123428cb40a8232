"""The trace of one row's cycle for display: its tree with probabilities, the accepted path, and why
it ended.

This module knows no requests and no method. Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.requests import Trace, TraceNode
from eyas.core.tree import Draft

__all__ = ["trace_of"]


def trace_of(draft: Draft, row: int, scores_NV: Tensor, path: Sequence[int], bonus: int, finish: str | None) -> Trace:
    """The trace of a row of a verified draft.

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
