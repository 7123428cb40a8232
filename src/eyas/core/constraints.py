"""Constraints: the only texts that a request may have (JSON, a grammar, a list of choices), as one
more step of each node's distribution.

A `Constraint` belongs to one request and follows its text. At every node of a draft tree it says
which tokens may come next; the others get probability 0 before the temperature is applied. So the
ids are those of plain decoding under the same constraint, with the same seed.

This module has the interface and asks for masks; it knows no grammar. Letters: N nodes, M nodes
that the constraint sees, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas.core.tree import Draft
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
            bool [N, V] on the CPU. All True for a node that the constraint forbids: one whose token
            its parent's row excludes, or that is below such a node, or after the end of the text.
            Such nodes are never accepted.
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


def tree_mask(
    constraint: Constraint, draft: Draft, row: int, eos: Collection[int], remaining: int, like_NV: Tensor
) -> Tensor:
    """bool [N, V]: the tokens that the constraint allows after each node of a row's tree, on the
    device of `like_NV`.

    The constraint sees only nodes that may be accepted. After other nodes (padding, lookahead's
    window nodes, nodes after an EOS or beyond the requested length) every token is allowed.
    """
    parents, tokens = draft.tree.parents_BN[row].tolist(), draft.tokens_BN[row].tolist()
    acceptable, depths = draft.tree.acceptable_BN[row].tolist(), draft.tree.depth_BN[row].tolist()
    number = {0: 0}  # node -> its number among those that the constraint sees
    for n in range(1, len(parents)):
        if parents[n] in number and acceptable[n] and tokens[n] not in eos and depths[n] < remaining:
            number[n] = len(number)
    mask_MV = constraint.mask([-1, *(number[parents[n]] for n in list(number)[1:])], [tokens[n] for n in number])
    mask_NV = torch.ones_like(like_NV, dtype=torch.bool)
    mask_NV[list(number)] = mask_MV.to(mask_NV.device)
    return mask_NV
