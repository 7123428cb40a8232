"""Hugging Face's logits processors over a tree: once per node, with that node's own prefix.

A processor may refuse prefixes that generate would never show it (a trie of allowed texts raises), so it is
run on those prefixes only that decoding can reach. Nodes are skipped

    that are no candidates (scouts, padding), and all nodes below a skipped one;
    whose token the processed scores of their parent forbid (greedy rows: whose token is not the best one);
    that end the text (EOS), or stand where the request's length is already reached.

Skipped nodes keep their logits: they are never accepted, or what follows them is cut off. So do nodes at which a processor fails; the
request fails if the accepted path reaches such a node (`Failures`), and others go on.

This module knows no model. Letters: N nodes, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.drafter import CycleInput
from eyas.core.requests import code_of_request
from eyas.core.sampling import Processor, Sampling, apply_sampling, apply_sampling_rows
from eyas.core.tree import Draft
from eyas.errors import EyasError, InputError

__all__ = ["Failures", "apply_processors", "node_scores", "run_processors"]

Failures = Mapping[tuple[int, int], EyasError]  # (row, node) -> why the node has no distribution


def node_scores(logits_BNV: Tensor, draft: Draft, cycle_input: CycleInput) -> tuple[Tensor, Failures]:
    """The scores at each node, and the nodes that have none because a processor failed.

    Each row's own `Sampling`, and its processors, once per node, with that node's own prefix where something depends on it.

    Returns:
        float32 [B, N, V]: softmax over V is the distribution from which plain decoding would draw at each node; the failures.
    """
    nodes = None if cycle_input.adjustments is None else cycle_input.adjustments.at(draft.tree, draft.tokens_BN)
    if not cycle_input.processors:
        return apply_sampling_rows(logits_BNV, cycle_input.sampling, nodes), {}
    rows, failures = list[Tensor](), dict[tuple[int, int], EyasError]()
    for b, (sampling, processors) in enumerate(zip(cycle_input.sampling, cycle_input.processors, strict=True)):
        adjustments = None if nodes is None else nodes[b]
        if not processors:
            rows.append(apply_sampling(logits_BNV[b], sampling, adjustments))
            continue
        tokens, eos, remaining = cycle_input.row_tokens[b], cycle_input.eos[b], cycle_input.remaining[b]
        scores_NV, failed = apply_processors(logits_BNV[b], draft, b, tokens, sampling, adjustments, processors, eos, remaining)
        rows.append(scores_NV)
        failures |= {(b, n): error for n, error in failed.items()}
    return torch.stack(rows), failures


def run_processors(processors: Sequence[Processor], tokens: Sequence[int], greedy: bool) -> Callable[[Tensor], Tensor] | None:
    """The processors of one prefix as `apply_sampling` takes them: scores [1, V] -> scores [1, V]; None without processors.

    Raises:
        InputError: a processor returns something else than scores, or scores that allow no token.
    """
    if not processors:
        return None

    def run(scores_1V: Tensor) -> Tensor:
        if scores_1V.isnan().any():  # the target is broken, which the Decoder reports
            return scores_1V
        ids_1T = torch.tensor([list(tokens)], device=scores_1V.device)
        scores_1V = scores_1V.clone()  # a processor may write into what it gets
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
        raise InputError(f"processor {name} returned {type(scores).__name__}: it must return its scores, a tensor of shape {list(shape)}")
    if scores.shape != shape:
        raise InputError(f"processor {name} returned scores of shape {list(scores.shape)}: it must return {list(shape)}")
    if bool(scores.isnan().any()) or (not greedy and bool((scores == torch.inf).any())):
        raise InputError(
            f"processor {name} returned scores that are {'NaN' if scores.isnan().any() else 'inf'}: they must be numbers or -inf"
        )
    if bool((scores == -torch.inf).all()):
        raise InputError(f"processor {name} forbids every token: at least one score must be above -inf")


def apply_processors(
    logits_NV: Tensor, draft: Draft, row: int, tokens: Sequence[int], sampling: Sampling, adjustments: Adjustments | None,
    processors: Sequence[Processor], eos: Collection[int], remaining: int,
) -> tuple[Tensor, dict[int, EyasError]]:  # fmt: skip
    """Scores [N, V] of one row's tree, processed node by node; and the errors of processors, by node.

    Args:
        row: of the draft.
        tokens: the row's text, its last token is the root.
        adjustments: as for `apply_sampling`.
        eos: tokens that end the text.
        remaining: tokens that the request may still get, 1 or more.
    """
    tree = draft.tree
    parents, drafted = tree.parents_BN[row].tolist(), draft.tokens_BN[row].tolist()
    candidates = tree.candidate_BN[row].tolist()
    scores_NV = logits_NV.float().clone()
    failures: dict[int, EyasError] = {}
    paths: list[list[int] | None] = []  # the tokens below the root; None: skipped
    for n, (parent, token) in enumerate(zip(parents, drafted, strict=True)):
        above = [] if n == 0 else paths[parent]
        path: list[int] | None = None
        if n == 0:
            path = []
        elif above is not None and candidates[n] and token not in eos and len(above) + 1 < remaining:
            parent_V = scores_NV[parent]
            least = parent_V.amax() if sampling.greedy else torch.finfo(parent_V.dtype).min
            path = [*above, token] if bool(parent_V[token] >= least) else None
        if path is not None:
            custom = run_processors(processors, [*tokens, *path], sampling.greedy)
            own = None if adjustments is None else adjustments[n : n + 1]
            try:
                scores_NV[n] = apply_sampling(logits_NV[n : n + 1], sampling, own, custom)[0]
            except EyasError as error:
                failures[n], path = error, None
        paths.append(path)
    return scores_NV, failures
