"""Drafting from a row's own text: guesses at the next tokens by its prompt and output.

`TextSession` keeps an `Index` of each row's tokens, on the host, and makes one tree of the guesses of all
rows. An index learns every token once, the root included: when a cycle begins it is certain to stay.

Every guess has an estimated probability. It begins with the length of the match that the guess comes from
(`MatchRates`). The text itself then shows how often such matches are right, token by token, drafted or not. So
`CycleInput.chooser` can leave out nodes that are not worth their time, and nothing has to be drafted to find
that out.

This module knows no way to guess and reads no features. Letters: B rows, N nodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.features import Guess
from eyas.core.tree import Draft, TargetOutput, Tree, Verdict, padded_nodes

__all__ = ["Guess", "Index", "MatchRates", "TextSession"]

LONGEST = 32  # longer matches are counted as matches of this length
PRIOR = 8.0  # weight of what is assumed, in matches
# A match of n tokens is right with n / (n + this) in the beginning: about what answers of chat models show.
PRIOR_LENGTH = 1.5


class MatchRates:
    """How often matches of each length were right, in one text so far."""

    def __init__(self) -> None:
        self._counts, self._hits = [0] * (LONGEST + 1), [0] * (LONGEST + 1)

    def count(self, length: int, hit: bool) -> None:
        place = min(length, LONGEST)
        self._counts[place] += 1
        self._hits[place] += hit

    def chance(self, length: int) -> float:
        """Return the estimated chance that a match of this length is right; never 0 or 1."""
        place = min(length, LONGEST)
        assumed = place / (place + PRIOR_LENGTH)
        return (self._hits[place] + PRIOR * assumed) / (self._counts[place] + PRIOR)


class Index(ABC):
    """One row's text, and its possible continuations."""

    tokens: list[int]

    def __init__(self) -> None:
        self._clear()

    @abstractmethod
    def _clear(self) -> None:
        """Empty the text."""

    @abstractmethod
    def append(self, token: int) -> None:
        """Add a token to the text."""

    def cut(self, length: int) -> None:
        if length < len(self.tokens):
            tokens = self.tokens[:length]
            self._clear()
            for token in tokens:
                self.append(token)

    @abstractmethod
    def guesses(self, least: float = 0.0) -> list[Guess]:
        """Return guessed continuations of the text: parents before children, siblings distinct. Those that are less
        probable than `least`, from the root on, may be left out."""


class TextSession(DraftSession):
    """Indexes of B rows.

    Args:
        nodes: upper bound of a tree's nodes, the root included. For fewer guesses the tree has 1,
            2, 3, 5, 9, ... nodes (a power of two and the root), of which the last are padding. So there are few
            shapes, and a cycle without a guess costs a step of plain decoding.
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
        chooser = cycle_input.chooser
        least = 0.0 if chooser is None else chooser.least
        guesses: list[list[Guess]] = []
        for row, active in enumerate(self.active):
            self._learn(row, [roots[row]] if active else [])
            guesses.append(self._guesses(row, cycle_input, least) if active and least < 1 else [])
        if chooser is not None and any(guesses):
            limits = cycle_input.draft_limits or (None,) * len(guesses)
            ordered = [_best_first(row, limit) for row, limit in zip(guesses, limits, strict=True)]
            counts = chooser.choose([chances for _, chances in ordered])
            guesses = [row[:count] for (row, _), count in zip(ordered, counts, strict=True)]
        return self._draft(roots, guesses, cycle_input.tokens_B)

    def _guesses(self, row: int, cycle_input: CycleInput, least: float) -> list[Guess]:
        """Return the guesses of one row, with the guesses of its request's features."""
        own = guesses = self.indexes[row].guesses(least)
        for feature in cycle_input.features[row] if cycle_input.features else ():
            guesses = feature.guesses(guesses, self.depth, least)
        return own if guesses is own else _best_first(guesses, self.nodes - 1)[0]

    def _draft(self, roots: Sequence[int], guesses: Sequence[Sequence[Guess]], tokens_B: Tensor) -> Draft:
        tree = _tree(tuple(tuple(g.parent for g in row) for row in guesses), self.nodes, self.depth, tokens_B.device)
        if tree.nodes == 1:
            return Draft(tree, tokens_B[:, None])

        def table(root: Callable[[int], Any], column: Callable[[Guess], Any], padding: Any) -> Tensor:
            """Return [B, N]: the entry of the root, the entries of the guesses, padding."""
            pairs = zip(roots, guesses, strict=True)
            rows = [[root(t), *map(column, row), *[padding] * (tree.nodes - 1 - len(row))] for t, row in pairs]
            return torch.tensor(rows, device=tokens_B.device)

        scores_BN = table(lambda _: 0.0, lambda guess: guess.logp, -math.inf) if self.scored else None
        return Draft(tree, table(lambda root: root, lambda guess: guess.token, 0), scores_BN)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        rows = zip(verdict.tokens_BP.tolist(), verdict.length_B.tolist(), self.active, strict=True)
        for row, (tokens, length, active) in enumerate(rows):
            self._learn(row, tokens[1:length] if active else [])


@lru_cache(256)
def _tree(parents: tuple[tuple[int, ...], ...], max_nodes: int, max_depth: int, device: torch.device) -> Tree:
    """Return the tree whose nodes below the root have these parents; most cycles have one of a few trees."""
    counts = tuple(1 + len(row) for row in parents)
    nodes = min(padded_nodes(max(counts) - 1), max_nodes)
    table = [[-1, *row, *[0] * (nodes - 1 - len(row))] for row in parents]
    acceptable_BN = torch.arange(nodes, device=device) < torch.tensor(counts, device=device)[:, None]
    depth = min(max_depth, nodes - 1)  # few shapes of trees: as deep as their nodes allow
    return Tree.build(torch.tensor(table, device=device), depth, acceptable_BN, counts)


def _best_first(guesses: Sequence[Guess], limit: int | None) -> tuple[list[Guess], list[float]]:
    """Return the guesses, the most probable from the root on first, and these probabilities; at most `limit`."""
    chances = [1.0]
    for guess in guesses:
        chances.append(chances[guess.parent] * math.exp(guess.logp))
    # stable: a parent stays before its children
    order = sorted(range(len(chances)), key=lambda n: -chances[n])[: None if limit is None else limit + 1]
    place = {n: number for number, n in enumerate(order)}
    ordered = [guesses[n - 1]._replace(parent=place[guesses[n - 1].parent]) for n in order[1:]]
    return ordered, [chances[n] for n in order[1:]]
