"""Constraints: the only texts that a request may have (JSON, a grammar, a list of choices), as one
more step of each node's distribution.

A `core.features.Constraint` belongs to one request and follows its text. At every node of a draft tree it says
which tokens may come next; the others get probability 0 before the temperature is applied. So the
ids are those of plain decoding under the same constraint, with the same seed.

This module asks for masks; it knows no grammar. `features.guidance` applies them.
Letters: N nodes, M nodes that the constraint sees, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.features import Constraint, RowNodes
from eyas.errors import EyasError, InputError, code_of_request

__all__ = ["Constraint", "GuardedConstraint", "tree_mask"]


class GuardedConstraint:
    """Wraps a constraint: its exceptions, and masks of a wrong shape, become InputErrors. An error
    in `forced`, which only drafts, is raised by the next `mask`."""

    def __init__(self, constraint: Constraint, vocab: int) -> None:
        self.constraint, self.vocab = constraint, vocab
        self.error: EyasError | None = None

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
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
        with code_of_request("constraint"):
            self.constraint.accept(tokens)

    @property
    def finished(self) -> bool:
        with code_of_request("constraint"):
            return self.constraint.finished

    def forced(self, limit: int) -> list[int]:
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
