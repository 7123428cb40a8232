"""Computes the scores of every node: sampling, constraint masks, and logits processors with each
node's own prefix.

A processor may refuse prefixes that generate would never show it (a trie of allowed texts raises),
so it is run only where plain decoding could stand: at the nodes that are open (`core.ends`) and
whose token the processed scores of their parent allow (in greedy rows: whose token is the best one).

Other nodes keep their raw logits: they cannot be accepted, or everything after them is cut off. So
do nodes whose processor failed. A request fails only if its text reaches such a node and goes on
from there (`Failures`); other requests continue.

This module knows no model. Letters: N nodes, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.constraints import tree_mask
from eyas.core.drafter import CycleInput
from eyas.core.ops import REFERENCE, Ops
from eyas.core.sampling import Processor, Sampling, apply_sampling, apply_sampling_rows
from eyas.core.tree import Draft
from eyas.errors import EyasError, InputError, code_of_request

__all__ = ["Failures", "apply_processors", "make_custom", "node_scores"]

NOTHING_LEFT = "no token may come next: what the constraint allows, min_tokens excludes, or nothing is allowed at all"

Failures = Mapping[tuple[int, int], EyasError]  # (row, node) -> why the node has no distribution


def node_scores(
    logits_BNV: Tensor, draft: Draft, cycle_input: CycleInput, ops: Ops = REFERENCE
) -> tuple[Tensor, Failures]:
    """The scores at each node, and the nodes that have none because a processor or a constraint
    failed.

    Each row has its own `Sampling`, constraint and processors. Each node's own prefix is used if
    something depends on it.

    Returns:
        scores [B, N, V], whose softmax over V is the distribution from which plain decoding would
        draw at each node: float32, but if tokens are only drawn from them, `ops` may leave logits
        in their own dtype; and the failures.
    """
    nodes = None if cycle_input.adjustments is None else cycle_input.adjustments.for_tree(draft.tree, draft.tokens_BN)
    if not cycle_input.processors and not cycle_input.constraints:
        scores = ops.scores if draft.q_BNV is None else apply_sampling_rows
        return scores(logits_BNV, cycle_input.sampling, nodes), {}
    scores_by_row, failures = list[Tensor](), dict[tuple[int, int], EyasError]()
    for b in range(len(logits_BNV)):
        scores_NV, failed = _row_scores(logits_BNV[b], draft, b, cycle_input, None if nodes is None else nodes[b])
        scores_by_row.append(scores_NV)
        failures |= {(b, n): error for n, error in failed.items()}
    return torch.stack(scores_by_row), failures


def _row_scores(
    logits_NV: Tensor, draft: Draft, b: int, cycle_input: CycleInput, adjustments: Adjustments | None
) -> tuple[Tensor, dict[int, EyasError]]:
    """One row of `node_scores`; the failures by node."""
    sampling, failures = cycle_input.sampling[b], dict[int, EyasError]()
    processors = cycle_input.processors[b] if cycle_input.processors else ()
    constraint = cycle_input.constraints[b] if cycle_input.constraints else None
    if not processors and constraint is None:
        return apply_sampling(logits_NV, sampling, adjustments), {}
    tree, mask_NV = draft.tree, None
    parents, tokens = tree.parents_BN[b].tolist(), draft.tokens_BN[b].tolist()
    open_nodes = cycle_input.ends[b].open_nodes(parents, tokens, tree.acceptable_BN[b].tolist())
    if constraint is not None:
        mask_NV, failures = tree_mask(constraint, parents, tokens, open_nodes)
        mask_NV = mask_NV.to(logits_NV.device)
    if processors:
        nodes = {node: (parents[node], path) for node, path in open_nodes.items() if node not in failures}
        text = cycle_input.row_tokens[b]
        scores_NV, failed = apply_processors(logits_NV, nodes, text, sampling, adjustments, processors, mask_NV)
        return scores_NV, failures | failed
    assert mask_NV is not None

    def masked(scores_NV: Tensor) -> Tensor:
        allowed_NV = scores_NV.masked_fill(~mask_NV, -torch.inf)
        dead_N = (allowed_NV == -torch.inf).all(-1)
        failures.update((n, InputError(NOTHING_LEFT)) for n in dead_N.nonzero()[:, 0].tolist())
        return allowed_NV

    return apply_sampling(logits_NV, sampling, adjustments, masked), failures


def make_custom(
    processors: Sequence[Processor], tokens: Sequence[int], greedy: bool, mask_1V: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """The argument `custom` of `apply_sampling` for one prefix: a function, scores [1, V] -> scores
    [1, V], that applies the constraint's mask and the processors.

    Raises:
        InputError: a processor returns something else than scores, or scores that allow no token.
    """

    def run(scores_1V: Tensor) -> Tensor:
        if scores_1V.isnan().any():  # the target is broken, which the Decoder reports
            return scores_1V
        ids_1T = torch.tensor([list(tokens)], device=scores_1V.device)
        # processors may write into it
        scores_1V = scores_1V.clone() if mask_1V is None else scores_1V.masked_fill(~mask_1V, -torch.inf)
        if bool((scores_1V == -torch.inf).all()):
            raise InputError(NOTHING_LEFT)
        for processor in processors:
            shape = scores_1V.shape
            with code_of_request(f"processor {_name(processor)}"):
                scores_1V = processor(ids_1T, scores_1V)
            _check(processor, scores_1V, shape, greedy)
        return scores_1V

    return run


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", None) or type(processor).__name__


def _check(processor: Processor, scores: object, shape: torch.Size, greedy: bool) -> None:
    name = _name(processor)
    if not isinstance(scores, Tensor):
        raise InputError(
            f"processor {name} returned {type(scores).__name__}: it must return its scores, a tensor of shape {list(shape)}"
        )
    if scores.shape != shape:
        raise InputError(
            f"processor {name} returned scores of shape {list(scores.shape)}: it must return {list(shape)}"
        )
    if bool(scores.isnan().any()) or (not greedy and bool((scores == torch.inf).any())):
        raise InputError(
            f"processor {name} returned scores that are {'NaN' if scores.isnan().any() else 'inf'}: they must be numbers or -inf"
        )
    if bool((scores == -torch.inf).all()):
        raise InputError(f"processor {name} forbids every token: at least one score must be above -inf")


def apply_processors(
    logits_NV: Tensor, nodes: Mapping[int, tuple[int, Sequence[int]]], text: Sequence[int], sampling: Sampling,
    adjustments: Adjustments | None, processors: Sequence[Processor], mask_NV: Tensor | None,
) -> tuple[Tensor, dict[int, EyasError]]:  # fmt: skip
    """Scores [N, V] of one row's tree, processed node by node; and the errors of processors, by
    node.

    Args:
        nodes: the parent of each node at which plain decoding could stand, and the tokens from below
            the root to it; a parent comes before its children.
        text: the row's text; its last token is the root.
        adjustments: as for `apply_sampling`.
        mask_NV: bool; the tokens that a constraint allows.
    """
    scores_NV = logits_NV.float().clone()
    failures, processed = dict[int, EyasError](), set[int]()
    for n, (parent, path) in nodes.items():
        if path:
            parent_V = scores_NV[parent]
            least = parent_V.amax() if sampling.greedy else torch.finfo(parent_V.dtype).min
            if parent not in processed or not bool(parent_V[path[-1]] >= least):
                continue
        mask_1V = None if mask_NV is None else mask_NV[n : n + 1]
        custom = make_custom(processors, [*text, *path], sampling.greedy, mask_1V)
        own = None if adjustments is None else adjustments[n : n + 1]
        try:
            scores_NV[n] = apply_sampling(logits_NV[n : n + 1], sampling, own, custom)[0]
            processed.add(n)
        except EyasError as error:
            failures[n] = error
    return scores_NV, failures
