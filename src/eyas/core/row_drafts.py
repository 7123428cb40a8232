"""The options of each request about its drafts, applied to the session of any method.

    Request.draft          "off": a plain row (core/dormant.py); n: at most n acceptable nodes below the root
    Request.features       text that may, or must, come next (`RowFeature.continuations`), such as a predicted text:
                           its tree is merged with the method's

If no request of a cycle uses these, the method's draft is returned as it is. While the answers of
all rows follow their continuations for many tokens, the method's session is dormant: its own tree
could add little.

**Limits and losslessness.** In a deterministic tree the ids do not depend on the tree, so a limit
keeps the most probable nodes. If children are sampled from q, whether a node is kept must not
depend on the drawn tokens: verification divides by q, which is the distribution of the drawn token
only if nothing else decides whether the token is tested. So the limit keeps nodes by their position
in the tree alone: a parent before its children, a sibling before those drawn after it. The result
is a smaller tree whose shape does not depend on the draws, and it is verified as such.

Rows whose features guide drafts are verified as deterministic trees in every cycle, also if the
method samples children: their ids are plain decoding's, whatever is predicted.

This module knows no method and no feature. Letters: B rows, N nodes of the method's tree, M nodes
of the continuations' one, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyas.core.dormant import AdaptiveDrafter, Decision, DormantSession
from eyas.core.drafter import Capturable, CycleInput, Drafter
from eyas.core.features import Continuation, RowFeature
from eyas.core.params import is_whole
from eyas.core.requests import DecisionLabel, Request
from eyas.core.tree import Draft, Tree, build_trie, merge, padded_nodes
from eyas.errors import OptionError

__all__ = ["RequestDraftSession", "check_draft", "limit_nodes"]

# a row whose text has followed its continuation for this many tokens, or that has as many forced
# ones, needs no other draft
CONFIDENT_TOKENS = 8


def check_draft(request: Request) -> None:
    """Raise OptionError unless `draft` is auto, off or a number."""
    draft = request.draft
    if draft not in ("auto", "off") and (not is_whole(draft) or draft < 1):
        raise OptionError(f"draft must be auto, off or a number of draft tokens, 1 or more; got {draft!r}")


@dataclass(frozen=True)
class PredictionDecision:
    """The label of cycles in which the method was dormant because rows follow their continuations."""

    decision: DecisionLabel
    rows: frozenset[int]  # rows whose continuation is confident

    def label(self, row: int) -> str:
        return "prediction" if row in self.rows else self.decision.label(row)


class RequestDraftSession(DormantSession):
    """The session of a drafter, with the wishes of the requests in its rows: limits and continuations."""

    def __init__(self, drafter: Drafter, rows: int) -> None:
        method, policy = (drafter.drafter, drafter.policy) if isinstance(drafter, AdaptiveDrafter) else (drafter, None)
        super().__init__(method.open(rows), rows, policy, method.max_tree)
        self._prediction: PredictionDecision | None = None  # the label of a cycle in which it is not `decision`

    @property
    def label(self) -> DecisionLabel | None:
        """The decision about the current cycle."""
        return self._prediction or self.decision

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        if cycle_input.draft_limits or _guides(cycle_input):
            return None
        self.learns, self._prediction = True, None
        return super().capturable(cycle_input)

    def draft(self, cycle_input: CycleInput) -> Draft:
        guided = _guides(cycle_input)
        continuations = {row: _continuations(row, guides, cycle_input) for row, guides in guided.items()}
        continuations = {row: found for row, found in continuations.items() if found}
        draft = super().draft(self._without_method(cycle_input, continuations))
        self.learns = not continuations
        if continuations:
            draft = _merge(draft, continuations)
        if guided and draft.q_BNV is not None:
            deterministic_B = torch.zeros_like(cycle_input.active_B)
            deterministic_B[sorted(guided)] = True
            draft = replace(draft, deterministic_B=deterministic_B)
        return limit_nodes(draft, cycle_input.draft_limits) if cycle_input.draft_limits else draft

    def _without_method(self, cycle_input: CycleInput, continuations: dict[int, list[Continuation]]) -> CycleInput:
        """Return the input for the method: if every row is off, or has a confident continuation, no row
        wants its drafts."""
        limits, rows = cycle_input.draft_limits, cycle_input.active_rows
        self._prediction = None
        confident = frozenset(row for row, found in continuations.items() if _confident(found[0]))
        if not confident or any(row not in confident and not (limits and limits[row] == 0) for row in rows):
            return cycle_input
        self._prediction = PredictionDecision(Decision(plain=frozenset(rows)), confident)
        return replace(cycle_input, draft_limits=(0,) * len(cycle_input.sampling))


def _confident(continuation: Continuation) -> bool:
    return (
        continuation.chance > CONFIDENT_TOKENS / (CONFIDENT_TOKENS + 1) and len(continuation.tokens) >= CONFIDENT_TOKENS
    )


def _guides(cycle_input: CycleInput) -> dict[int, list[RowFeature]]:
    """Return the features that guide drafts, for each active row that has any."""
    if not cycle_input.features:
        return {}
    guides = {row: [f for f in cycle_input.features[row] if f.guides] for row in cycle_input.active_rows}
    return {row: features for row, features in guides.items() if features}


def _continuations(row: int, guides: Sequence[RowFeature], cycle_input: CycleInput) -> list[Continuation]:
    """Return possible continuations of the row's text, the most certain first; none if the row is not to be drafted
    for."""
    if cycle_input.draft_limits and cycle_input.draft_limits[row] == 0:
        return []
    return [found for feature in guides for found in feature.continuations(cycle_input.row_tokens[row])]


def _merge(draft: Draft, continuations: dict[int, list[Continuation]]) -> Draft:
    """Return the method's tree, then the nodes of the continuations that it does not have, padded to 2, 3,
    5, 9, ... nodes, so that few shapes occur."""
    tries = {row: build_trie(continuation.tokens for continuation in found) for row, found in continuations.items()}
    nodes = max(2, padded_nodes(max(len(tokens) for _, tokens in tries.values())))
    B, device = draft.tree.rows, draft.tokens_BN.device
    parents, tokens = torch.zeros(B, nodes, dtype=torch.long), torch.zeros(B, nodes, dtype=torch.long)
    acceptable, log_q = torch.zeros(B, nodes, dtype=torch.bool), torch.full((B, nodes), -math.inf)
    parents[:, 0], acceptable[:, 0], log_q[:, 0] = -1, True, 0.0
    for row, (row_parents, row_tokens) in tries.items():
        part = slice(1, 1 + len(row_tokens))
        parents[row, part], tokens[row, part] = torch.tensor(row_parents) + 1, torch.tensor(row_tokens)
        # The best continuation's chance serves for all of them: it only ranks nodes for a limit.
        acceptable[row, part], log_q[row, part] = True, math.log(continuations[row][0].chance)
    tokens_BM = tokens.to(device)
    tokens_BM[:, 0] = draft.tokens_BN[:, 0]
    depth = max(len(continuation.tokens) for found in continuations.values() for continuation in found)
    predicted = Draft(Tree.build(parents.to(device), depth, acceptable.to(device)), tokens_BM, log_q.to(device))
    if draft.tree.nodes == 1:
        draft = replace(draft, log_q_BN=torch.zeros_like(draft.tokens_BN, dtype=torch.float))
    merged = merge(draft, predicted)
    return replace(merged, q_BNV=draft.q_BNV, block_verification=draft.block_verification)


def limit_nodes(draft: Draft, limits: Sequence[int | None]) -> Draft:
    """Return the draft with at most `limits` acceptable nodes below the root of each row; None for all of
    them. See "Limits and losslessness" above."""
    tree = draft.tree
    same_parent_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None]
    elder_BN = same_parent_BNN.tril(-1).sum(-1)  # number of siblings before each node
    # decreases from parents to children and from sibling to sibling
    place_BN = -(tree.mask_BNN * (1 + elder_BN)[:, None]).sum(-1).double()
    key_BN = torch.where(tree.acceptable_BN, place_BN, -math.inf)
    value_BN = draft.value_BN if draft.value_BN is not None else _path_log_q(draft)
    if draft.q_BNV is not None:
        place_BN[:, draft.q_BNV.shape[1] :] = -math.inf  # nodes of other rows' continuations
        sampled_B1 = (
            torch.ones_like(tree.acceptable_BN[:, :1])
            if draft.deterministic_B is None
            else ~draft.deterministic_B[:, None]
        )
        key_BN = torch.where(sampled_B1, place_BN, key_BN)
    elif value_BN is not None:
        key_BN = torch.where(tree.acceptable_BN, value_BN.double(), -math.inf)
    key_BN[:, 0] = math.inf
    rank_BN = key_BN.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)  # the root has rank 0
    limit_B1 = torch.tensor([tree.nodes if limit is None else limit for limit in limits], device=rank_BN.device)[
        :, None
    ]
    return replace(draft, tree=replace(tree, acceptable_BN=tree.acceptable_BN & (rank_BN <= limit_B1)))


def _path_log_q(draft: Draft) -> Tensor | None:
    """Return log q of the path to each node, float32 [B, N]; None if the draft has no q."""
    if draft.log_q_BN is None:
        return None
    return torch.where(draft.tree.mask_BNN, draft.log_q_BN[:, None], 0.0).sum(-1)
