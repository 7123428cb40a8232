"""Constraints: the only texts that a request may have (JSON, a grammar, a list of choices), as one
more step of each node's distribution.

A `Constraint` belongs to one request and follows its text. At every node of a draft tree it says
which tokens may come next; the others get probability 0 before the temperature is applied. So the
ids are those of plain decoding under the same constraint, with the same seed.

This module has the interface and asks for masks; it knows no grammar. `features.guidance` applies them.
Letters: N nodes, M nodes that the constraint sees, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas.core.features import RowNodes
from eyas.errors import EyasError, InputError, code_of_request

__all__ = ["Constraint", "GuardedConstraint", "tree_mask"]


class Constraint(Protocol):
    """The texts that one request may have. It follows the emitted tokens, so it serves one request,
    once."""

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """The tokens that may follow each node of a tree.

        Args:
            parents: the parent of each of N nodes, -1 for node 0, the root; each parent before its
                children.
            tokens: the token of each node. The root's has been accepted already, or is the prompt's
                last token.

        Returns:
            bool [N, V] on the CPU. No True for a node that completes the text, so that nothing may
            follow. All True for a node that the constraint forbids: one whose token its parent's row
            excludes, or that is below such a node, or after the end of the text. Such nodes are
            never accepted.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the emitted tokens, in order, an EOS included. Called after every cycle, and after
        the first token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may follow the accepted tokens: the request then ends with "stop"."""
        ...

    def forced(self, limit: int) -> list[int]:
        """The tokens that must come next, at most `limit`; they may be drafted, and are verified
        like any draft."""
        ...


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
    """The tokens that the constraint allows after each node of a row's tree, bool [N, V] on the CPU;
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
