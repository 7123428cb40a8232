"""Drafting from text alone: what a row's own prompt and output say about what comes next.

`TextSession` keeps an `Index` of each row's tokens, on the host, and makes one tree of fixed size of what each index guesses. An index
learns every token once, the root included: that is known to stay when a cycle begins.

This module knows no way to guess and no features.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict

__all__ = ["Guess", "Index", "TextSession"]


class Guess(NamedTuple):
    """A node of the tree; the first guess is node 1."""

    parent: int  # node number; 0 = the root
    token: int
    logp: float  # log of its estimated probability given its parent


class Index(ABC):
    """One row's text, and what it foretells."""

    tokens: list[int]

    @abstractmethod
    def append(self, token: int) -> None:
        """The text goes on."""

    @abstractmethod
    def cut(self, length: int) -> None:
        """Back to the first `length` tokens."""

    @abstractmethod
    def guesses(self) -> list[Guess]:
        """What may follow the text: parents before children, siblings distinct."""


class TextSession(DraftSession):
    """Rows of text.

    Args:
        nodes: of a tree at most, the root included. Where fewer are guessed it has 1, 2, 3, 5, 9, ... of them (a power of two and the
            root), the last ones padding: few shapes, and a cycle without a guess costs a step of plain decoding.
        depth: no guess lies deeper.
        scored: whether the guesses have probabilities.
    """

    def __init__(self, rows: int, index: Callable[[], Index], nodes: int, depth: int, scored: bool) -> None:
        self.index, self.nodes, self.depth, self.scored = index, nodes, depth, scored
        self.rows = [index() for _ in range(rows)]
        self.active = [False] * rows  # in the cycle under way

    def keep(self, row: int, length: int) -> int:
        self.rows[row].cut(length)
        return length

    def begin(self, row: int, kept: int, total: int) -> None:
        if not kept:
            self.rows[row] = self.index()

    def end(self, row: int) -> None:
        self.rows[row] = self.index()

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        self._learn(row, tokens_T.tolist())

    def _learn(self, row: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.rows[row].append(token)

    def draft(self, roots: CycleInput) -> Draft:
        if roots.row_tokens:  # what the host knows need not come from the device
            tokens, self.active = [text[-1] if text else 0 for text in roots.row_tokens], [bool(text) for text in roots.row_tokens]
        else:
            tokens, self.active = roots.tokens_B.tolist(), roots.active_B.tolist()
        guesses: list[list[Guess]] = []
        for row, active in enumerate(self.active):
            self._learn(row, [tokens[row]] if active else [])
            guesses.append(self.rows[row].guesses() if active else [])
        return self._tree(tokens, guesses, roots.tokens_B.device)

    def _tree(self, roots: Sequence[int], guesses: Sequence[Sequence[Guess]], device: torch.device) -> Draft:
        nodes, max_position = 1, max(map(len, guesses), default=0)
        while nodes <= max_position:
            nodes = min(2 * nodes - (nodes > 1), self.nodes)

        def table(root: Callable[[int], Any], column: Callable[[Guess], Any], padding: Any) -> Tensor:
            """[B, N]: the root's entry, those of the guesses, padding."""
            lines = zip(roots, guesses, strict=True)
            rows = [[root(t), *map(column, found), *[padding] * (nodes - 1 - len(found))] for t, found in lines]
            return torch.tensor(rows, device=device)

        parents_BN = table(lambda _: -1, lambda guess: guess.parent, 0)
        candidate_BN = table(lambda _: True, lambda _: True, False)
        scores = table(lambda _: 0.0, lambda guess: guess.logp, -math.inf) if self.scored else None
        tokens_BN = table(lambda root: root, lambda guess: guess.token, 0)
        return Draft(Tree.build(parents_BN, self.depth if max_position else 0, candidate_BN), tokens_BN, scores)

    def commit(self, draft: Draft, verdict: Verdict, seen: TargetOutput) -> None:
        lines = zip(verdict.tokens_BP.tolist(), verdict.length_B.tolist(), self.active, strict=True)
        for row, (tokens, length, active) in enumerate(lines):
            self._learn(row, tokens[1:length] if active else [])
