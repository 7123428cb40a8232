"""Drafting from a row's own text: what its prompt and output say about the next tokens.

`TextSession` keeps an `Index` of each row's tokens, on the host, and makes one tree of the guesses of all
rows. An index learns every token once, the root included: when a cycle begins it is certain to stay.

This module knows no way to guess and reads no features. Letters: B rows, N nodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict, padded_nodes

__all__ = ["Guess", "Index", "TextSession"]


class Guess(NamedTuple):
    """A node of the tree; the first guess is node 1."""

    parent: int  # node number; 0 = the root
    token: int
    logp: float  # log of its estimated probability given its parent


class Index(ABC):
    """One row's text, and what may follow it."""

    tokens: list[int]

    @abstractmethod
    def append(self, token: int) -> None:
        """The text goes on with this token."""

    @abstractmethod
    def cut(self, length: int) -> None:
        """The text goes back to its first `length` tokens."""

    @abstractmethod
    def guesses(self) -> list[Guess]:
        """Guessed continuations of the text: parents before children, siblings distinct."""


class TextSession(DraftSession):
    """Indexes of B rows.

    Args:
        nodes: upper bound of a tree's nodes, the root included. For fewer guesses the tree has 1,
            2, 3, 5, 9, ... nodes (a power of two and the root), the last ones padding: there are
            few shapes, and a cycle without a guess costs a step of plain decoding.
        depth: no guess is deeper.
        scored: the guesses have probabilities.
    """

    def __init__(self, rows: int, index: Callable[[], Index], nodes: int, depth: int, scored: bool) -> None:
        self.new_index = index
        self.nodes = nodes
        self.depth = depth
        self.scored = scored
        self.indexes = [index() for _ in range(rows)]
        self.active = [False] * rows  # in the cycle under way

    def truncate(self, row: int, length: int) -> int:
        self.indexes[row].cut(length)
        return length

    def copy(self, source: int, row: int, length: int) -> int:
        self.indexes[row] = self.new_index()
        self._learn(row, self.indexes[source].tokens[:length])
        return len(self.indexes[row].tokens)

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        if not cached_tokens:
            self.indexes[row] = self.new_index()

    def end(self, row: int) -> None:
        self.indexes[row] = self.new_index()

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self._learn(row, tokens_T.tolist())

    def _learn(self, row: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.indexes[row].append(token)

    def draft(self, cycle_input: CycleInput) -> Draft:
        if cycle_input.row_tokens:  # known to the host without a transfer from the device
            roots = [tokens[-1] if tokens else 0 for tokens in cycle_input.row_tokens]
            self.active = [bool(tokens) for tokens in cycle_input.row_tokens]
        else:
            roots, self.active = cycle_input.tokens_B.tolist(), cycle_input.active_B.tolist()
        guesses: list[list[Guess]] = []
        for row, active in enumerate(self.active):
            self._learn(row, [roots[row]] if active else [])
            guesses.append(self.indexes[row].guesses() if active else [])
        return self._tree(roots, guesses, cycle_input.tokens_B.device)

    def _tree(self, roots: Sequence[int], guesses: Sequence[Sequence[Guess]], device: torch.device) -> Draft:
        most = max(map(len, guesses), default=0)
        nodes = min(padded_nodes(most), self.nodes)

        def table(root: Callable[[int], Any], column: Callable[[Guess], Any], padding: Any) -> Tensor:
            """[B, N]: the root's entry, those of the guesses, padding."""
            pairs = zip(roots, guesses, strict=True)
            rows = [[root(t), *map(column, row), *[padding] * (nodes - 1 - len(row))] for t, row in pairs]
            return torch.tensor(rows, device=device)

        parents_BN = table(lambda _: -1, lambda guess: guess.parent, 0)
        acceptable_BN = table(lambda _: True, lambda _: True, False)
        scores_BN = table(lambda _: 0.0, lambda guess: guess.logp, -math.inf) if self.scored else None
        tokens_BN = table(lambda root: root, lambda guess: guess.token, 0)
        return Draft(Tree.build(parents_BN, self.depth if most else 0, acceptable_BN), tokens_BN, scores_BN)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        rows = zip(verdict.tokens_BP.tolist(), verdict.length_B.tolist(), self.active, strict=True)
        for row, (tokens, length, active) in enumerate(rows):
            self._learn(row, tokens[1:length] if active else [])
