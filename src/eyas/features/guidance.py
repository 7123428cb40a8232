"""Guides of a request's text from outside: a constraint, and logits processors.

The constraint's mask comes after bias, penalties and min_tokens, the processors come after the mask, then
temperature, top-k, top-p and min-p. A processor is run with each node's own prefix.

A processor may refuse prefixes that generate would never show it (a trie of allowed texts raises). So it runs
only where plain decoding could stand: at the nodes that are open (`core.features`) and whose token the
processed scores of their parent allow. In greedy rows their token must be the best one.

Other nodes keep their raw logits: they cannot be accepted, or everything after them is cut off. So
do nodes whose processor failed. A request fails only if its text reaches such a node and goes on
from there; other requests continue.

This module knows no model and no grammar. Letters: N nodes, M nodes that the constraint sees, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.features import MAX_CONTINUATION, Constraint, Continuation, RowFeature, RowNodes
from eyas.core.requests import Request, RequestFeature
from eyas.core.sampling import Processor, Sampling, apply_sampling
from eyas.core.target import Target
from eyas.errors import EyasError, InputError, code_of_request

__all__ = ["Constraint", "Guidance", "apply_processors", "make_custom"]

FORCED_CHANCE = 0.99  # estimated probability of a forced token: another tokenisation of the text may come
NOTHING_LEFT = "no token may come next: what the constraint allows, min_tokens excludes, or nothing is allowed at all"


# Processors of transformers with a memory: in a tree they would see tokens that are never emitted.
STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }
)


def check_processor(processor: Processor) -> Processor:
    """Return the processor. Raise InputError if it cannot be asked about every node of a tree."""
    name = type(processor).__name__
    if STATEFUL & {kind.__name__ for kind in type(processor).__mro__}:
        raise InputError(
            f"{name} keeps a memory, and in a tree it would see tokens that are never emitted: decode without it"
        )
    if isinstance(processor, type) or not callable(processor):
        raise InputError(f"logits_processor must hold callables (ids, scores) -> scores, got {processor!r}")
    return processor


@dataclass(frozen=True)
class Guidance(RequestFeature):
    """A constraint, which serves one request alone, or logits processors, or both.

    Attributes:
        processors: called once for each node with the node's own prefix, which is slow.
        constraint: the texts that the answer may have.
    """

    processors: tuple[Processor, ...] = ()
    constraint: Constraint | None = None

    @property
    def has_scores(self) -> bool:  # type: ignore[override]
        """True: processors change the scores, and the engine must not reuse raw ones."""
        return True

    @property
    def runs_per_node(self) -> tuple[str, ...]:
        return tuple(type(processor).__name__ for processor in self.processors)

    def open(self, request: Request, target: Target) -> RowFeature:
        guarded = None if self.constraint is None else GuardedConstraint(self.constraint, target.vocab_size)
        return _RowGuidance(self.processors, guarded)


class _RowGuidance(RowFeature):
    """The constraint and the processors of one row."""

    has_scores = True

    def __init__(self, processors: tuple[Processor, ...], constraint: GuardedConstraint | None) -> None:
        self.processors, self.constraint = processors, constraint
        self.guides = self.masks = constraint is not None

    def continuations(self, text: Sequence[int]) -> list[Continuation]:
        forced = [] if self.constraint is None else self.constraint.forced(MAX_CONTINUATION)
        return [Continuation(forced, FORCED_CHANCE)] if forced else []

    def mask(self, nodes: RowNodes) -> tuple[Tensor, Mapping[int, EyasError]]:
        assert self.constraint is not None
        return tree_mask(self.constraint, nodes)

    def accept(self, token: int) -> bool:
        if self.constraint is None:
            return False
        self.constraint.accept([token])
        return self.constraint.finished

    def scores(
        self, logits_NV: Tensor, nodes: RowNodes, sampling: Sampling, adjustments: Adjustments | None
    ) -> tuple[Tensor, Mapping[int, EyasError]]:
        mask_NV, failures = None, dict[int, EyasError]()
        if self.constraint is not None:
            mask_NV, failures = tree_mask(self.constraint, nodes)
            mask_NV = mask_NV.to(logits_NV.device)
        if self.processors:
            asked = {n: (nodes.parents[n], path) for n, path in nodes.open_nodes.items() if n not in failures}
            scores_NV, failed = apply_processors(
                logits_NV, asked, nodes.text, sampling, adjustments, self.processors, mask_NV
            )
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
    """Return the argument `custom` of `apply_sampling` for one prefix: a function of scores [1, V] that returns scores
    [1, V] after the constraint's mask and the processors.

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
    """Return the scores [N, V] of one row's tree, processed node by node, and the errors of processors, by node.

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


class GuardedConstraint:
    """Wraps a constraint: its exceptions, and masks of a wrong shape, become InputErrors. An error
    in `forced`, which only drafts, is raised by the next `mask`."""

    def __init__(self, constraint: Constraint, vocab: int) -> None:
        self.constraint, self.vocab = constraint, vocab
        self.error: EyasError | None = None

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Return the tokens that may follow each node, bool [N, V]. Raise InputError for a mask of another shape."""
        if self.error is not None:
            raise self.error
        with code_of_request("constraint"):
            mask_NV = self.constraint.mask(parents, tokens)
            if mask_NV.shape != (len(parents), self.vocab):
                raise InputError(
                    f"constraint gave a mask of shape {list(mask_NV.shape)}: it must be {[len(parents), self.vocab]}"
                )
            return mask_NV

    def accept(self, tokens: Sequence[int]) -> None:
        """Tell the constraint which tokens were emitted."""
        with code_of_request("constraint"):
            self.constraint.accept(tokens)

    @property
    def finished(self) -> bool:
        """Whether the constraint's text is complete."""
        with code_of_request("constraint"):
            return self.constraint.finished

    def forced(self, limit: int) -> list[int]:
        """Return the tokens that must come next, at most `limit`. An error is kept, and raised by the next `mask`."""
        try:
            with code_of_request("constraint"):
                return self.constraint.forced(limit)
        except EyasError as error:
            self.error = error
            return []


def tree_mask(constraint: GuardedConstraint, nodes: RowNodes) -> tuple[Tensor, dict[int, EyasError]]:
    """Return the tokens that the constraint allows after each node of a row's tree, bool [N, V] on the CPU;
    and the nodes at which it fails.

    The constraint sees only nodes at which plain decoding could stand (`TextEnd.open_nodes`). After
    other nodes, and where it fails, every token is allowed.
    """
    parents, tokens, open_nodes = nodes.parents, nodes.tokens, nodes.open_nodes
    mask_NV, failures = torch.ones(len(tokens), constraint.vocab, dtype=torch.bool), dict[int, EyasError]()
    number = {node: place for place, node in enumerate(open_nodes)}
    parents_M = [-1, *(number[parents[node]] for node in list(number)[1:])]
    try:
        mask_NV[list(number)] = constraint.mask(parents_M, [tokens[node] for node in number])
    except EyasError:
        for node, path in open_nodes.items():  # each alone, as plain decoding asks, to find out where it fails
            try:
                mask_NV[node] = constraint.mask(range(-1, len(path)), [tokens[0], *path])[-1]
            except EyasError as error:
                failures[node] = error
    return mask_NV, failures
