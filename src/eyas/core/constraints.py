"""Constraints: texts that a request may have and no others (JSON, a grammar, a list of choices), as one more step of each node's law.

A `Constraint` belongs to one request and follows its text. At every node of a draft tree it says which tokens may come next; the others get
probability 0 before the temperature is applied. So the ids are those of plain decoding under the same constraint, with the same seed.

This module has the interface and applies masks; it knows no grammar. Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Constraint"]


class Constraint(Protocol):
    """The texts that one request may have. It follows the emitted tokens, so it serves one request, once."""

    def mask(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """The tokens that may follow each node of a tree.

        Args:
            parents: the parent of each of N nodes, -1 for node 0, the root; each parent before its children.
            tokens: of the nodes. The root's token has been accepted already, or is the prompt's last token.

        Returns:
            bool [N, V] on the CPU. All True for a node that the constraint forbids: one whose token its parent's row excludes, or that
            lies below such a node, or behind the end of the text. Such nodes are never accepted.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the emitted tokens, in order, an EOS included. Called after every cycle, and after the first token."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may follow the accepted tokens: the request then ends with "stop"."""
        ...

    def forced(self, limit: int) -> list[int]:
        """Tokens of the text that must come next, at most `limit`; they may be drafted, and are verified like any draft."""
        ...
