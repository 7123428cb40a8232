"""The input of one cycle: the state of all rows, and the size of a dynamic tree. Letters: B rows, V
vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from eyas.core.adjustments import Adjustments
from eyas.core.cache import KVCache
from eyas.core.ends import TextEnd
from eyas.core.features import RowFeature
from eyas.core.sampling import GumbelNoise, Sampling

__all__ = ["CycleInput", "NodeChooser", "TreeSize"]


class TreeSize(NamedTuple):
    """The size of a dynamic tree (EAGLE-2)."""

    nodes: int  # nodes verified per cycle, the root included
    depth: int  # draft tokens on the longest path
    branch: int  # nodes expanded per level, and children drafted for each

    def within(self, limit: TreeSize) -> TreeSize:
        """Return the size with each number cut to that of `limit`."""
        return TreeSize(*map(min, self, limit))


class NodeChooser(Protocol):
    """Decides which nodes that could be drafted are worth the time that they take in the target's pass."""

    padded: bool  # whether every row takes the time of the largest tree's nodes

    @property
    def least(self) -> float:
        """Nodes with a smaller chance to be accepted are not worth their time."""
        ...

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many nodes of each row to verify, all rows weighed together.

        Args:
            chances: for each row, the estimated chances that its nodes are accepted, in descending order.
        """
        ...


@dataclass(frozen=True)
class CycleInput:
    """The state of all rows when a cycle begins. Tensors are on the device, everything else is
    known to the host."""

    tokens_B: Tensor  # int64; the roots: each row's newest token, emitted and not yet in any cache; 0 in empty rows
    position_B: Tensor  # int64; the roots' absolute positions = numbers of committed tokens
    active_B: Tensor  # bool; False: the row is empty, and its results are ignored
    sampling: tuple[Sampling, ...]  # the Sampling of each row; empty rows have that of an active one
    noise: GumbelNoise
    max_position: int  # upper bound of `position_B`, known to the host
    # [B, ...], adjustments by the texts up to the roots; None if no row's distribution depends on them
    adjustments: Adjustments | None = None
    active_rows: tuple[int, ...] = ()  # indices of the rows that are not empty
    # prompt and emitted tokens of each row, root last (before the last cycle, if this one runs
    # ahead); these lists grow after the cycle
    row_tokens: tuple[Sequence[int], ...] = ()
    features: tuple[tuple[RowFeature, ...], ...] = ()  # the features of each row; () if no row has any
    ends: tuple[TextEnd, ...] = ()  # what ends the text of each row (before the last cycle, if this one runs ahead)
    # most acceptable nodes below each row's root; None: no limit; () if no row has one
    draft_limits: tuple[int | None, ...] = ()
    top_tokens: int | None = None  # most probable tokens whose log-probabilities are wanted; None: no log-probabilities
    # the target's keys and values; slot s < `position_B` of a row holds those of its token s
    target_cache: KVCache | None = None
    tree_size: TreeSize | None = None  # size of a dynamic tree in this cycle; None: the drafter's options decide
    chooser: NodeChooser | None = None  # for methods that `choose_nodes`; None: all nodes are verified
