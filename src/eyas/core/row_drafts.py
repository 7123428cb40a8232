"""The options of each request about its drafts, applied to the draft of any method (by core/dormant.py).

    Request.drafting       "off": a plain row; n: at most n acceptable nodes below the root
    Request.features       text that may, or must, come next (`RowFeature.continuations`), such as a predicted text:
                           its tree is merged with the method's

**Limits and losslessness.** In a deterministic tree the ids do not depend on the tree, so a limit
keeps the most probable nodes. If children are sampled from q, the choice of the kept nodes must not depend on
the drawn tokens. Verification divides by q, and q is the distribution of the drawn token only if nothing else
decides whether the token is tested. So the limit keeps nodes by their position in the tree alone: a parent
before its children, a sibling before those drawn after it. The result is a smaller tree whose shape does not
depend on the draws, and it is verified as such.

Rows whose features guide drafts are verified as deterministic trees in every cycle, also if the
method samples children: their ids are plain decoding's for any prediction.

This module knows no method and no feature. Letters: B rows, N nodes of the method's tree, M nodes
of the continuations' one, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput
from eyas.core.features import Continuation, RowFeature
from eyas.core.params import is_whole
from eyas.core.requests import Request
from eyas.core.tree import Draft, Tree, build_trie, merge, padded_nodes
from eyas.errors import OptionError

__all__ = ["add_continuations", "check_drafting", "continuations_of", "guides_of", "is_confident", "limit_nodes"]

# a row whose text has followed its continuation for this many tokens, or that has as many forced
# ones, needs no other draft
CONFIDENT_TOKENS = 8


def check_drafting(request: Request) -> None:
    """Raise OptionError unless `drafting` is auto, off or a number."""
    drafting = request.drafting
    if drafting not in ("auto", "off") and (not is_whole(drafting) or drafting < 1):
        raise OptionError(f"drafting must be auto, off or a number of draft tokens, 1 or more; got {drafting!r}")


def guides_of(cycle_input: CycleInput) -> dict[int, list[RowFeature]]:
    """Return the features that guide drafts, for each active row that has any."""
    if not cycle_input.features:
        return {}
    guides = {row: [f for f in cycle_input.features[row] if f.guides] for row in cycle_input.active_rows}
    return {row: features for row, features in guides.items() if features}


def continuations_of(
    guides: Mapping[int, Sequence[RowFeature]], cycle_input: CycleInput
) -> dict[int, list[Continuation]]:
    """Return possible continuations of the text of each row that has any, the most certain first; none of rows that are
    not to be drafted for."""
    limits, continuations = cycle_input.draft_limits, dict[int, list[Continuation]]()
    for row, features in guides.items():
        if limits and limits[row] == 0:
            continue
        text = cycle_input.row_tokens[row]
        if found := [continuation for feature in features for continuation in feature.continuations(text)]:
            continuations[row] = found
    return continuations


def is_confident(continuation: Continuation) -> bool:
    """Return whether a row with this continuation needs no other draft."""
    is_likely = continuation.chance > CONFIDENT_TOKENS / (CONFIDENT_TOKENS + 1)
    return is_likely and len(continuation.tokens) >= CONFIDENT_TOKENS


def add_continuations(draft: Draft, continuations: Mapping[int, Sequence[Continuation]]) -> Draft:
    """Return the method's tree, then the nodes of the continuations that it does not have, padded to 2, 3,
    5, 9, ... nodes, so that few shapes occur."""
    if draft.tree.nodes == 1:
        draft = replace(draft, log_q_BN=torch.zeros_like(draft.tokens_BN, dtype=torch.float))
    both = merge(draft, _draft_of(continuations, draft.tokens_BN[:, 0]))
    return replace(draft, tree=both.tree, tokens_BN=both.tokens_BN, log_q_BN=both.log_q_BN, value_BN=None, drafted=None)


def _draft_of(continuations: Mapping[int, Sequence[Continuation]], root_tokens_B: Tensor) -> Draft:
    """Return a draft of the continuations alone: a trie of each row below its root; rows without any have padding."""
    tries = {row: build_trie(continuation.tokens for continuation in found) for row, found in continuations.items()}
    B, device = len(root_tokens_B), root_tokens_B.device
    M = max(2, padded_nodes(max(len(tokens) for _, tokens in tries.values())))
    parents_BM = torch.zeros(B, M, dtype=torch.long)
    tokens_BM = torch.zeros(B, M, dtype=torch.long)
    acceptable_BM = (torch.arange(M) == 0).repeat(B, 1)
    log_q_BM = torch.full((B, M), -math.inf)
    parents_BM[:, 0] = -1
    log_q_BM[:, 0] = 0.0
    for row, (parents, tokens) in tries.items():
        below = slice(1, 1 + len(tokens))
        parents_BM[row, below] = torch.tensor(parents) + 1
        tokens_BM[row, below] = torch.tensor(tokens)
        acceptable_BM[row, below] = True
        # The best continuation's chance serves for all of them: it only ranks nodes for a limit.
        log_q_BM[row, below] = math.log(continuations[row][0].chance)
    tokens_BM = tokens_BM.to(device)
    tokens_BM[:, 0] = root_tokens_B
    depth = max(len(continuation.tokens) for found in continuations.values() for continuation in found)
    tree = Tree.build(parents_BM.to(device), depth, acceptable_BM.to(device))
    return Draft(tree, tokens_BM, log_q_BM.to(device))


def limit_nodes(draft: Draft, limits: Sequence[int | None]) -> Draft:
    """Return the draft with at most `limits` acceptable nodes below the root of each row; None for all of
    them. See "Limits and losslessness" above."""
    tree = draft.tree
    key_BN = _keys(draft)
    key_BN[:, 0] = math.inf  # the root has rank 0
    rank_BN = key_BN.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    limit_B1 = torch.tensor([[tree.nodes if limit is None else limit] for limit in limits], device=rank_BN.device)
    return replace(draft, tree=replace(tree, acceptable_BN=tree.acceptable_BN & (rank_BN <= limit_B1)))


def _keys(draft: Draft) -> Tensor:
    """Return the number by which nodes are ranked, the largest first, float64 [B, N]: of deterministic trees their value;
    of sampled ones, and where nodes have no value, their place."""
    tree = draft.tree
    same_parent_BNN = tree.parents_BN[:, :, None] == tree.parents_BN[:, None]
    elder_BN = same_parent_BNN.tril(-1).sum(-1)  # number of siblings before each node
    # decreases from parents to children and from sibling to sibling
    place_BN = -(tree.mask_BNN * (1 + elder_BN)[:, None]).sum(-1).double()
    value_BN = draft.value_BN
    if value_BN is None and draft.log_q_BN is not None:  # log q of the path to each node
        value_BN = torch.where(tree.mask_BNN, draft.log_q_BN[:, None], 0.0).sum(-1)
    if draft.q_BNV is not None or value_BN is None:
        value_BN = place_BN
    key_BN = torch.where(tree.acceptable_BN, value_BN.double(), -math.inf)
    if draft.q_BNV is None:
        return key_BN
    place_BN[:, draft.q_BNV.shape[1] :] = -math.inf  # nodes of other rows' continuations
    return place_BN if draft.deterministic_B is None else torch.where(draft.deterministic_B[:, None], key_BN, place_BN)
