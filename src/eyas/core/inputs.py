"""The input of one cycle: where each row stands, and how large a tree may be. Letters: B rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from eyas.core.sampling import GumbelNoise, Processor, Sampling

__all__ = ["CycleInput", "Shape"]


class Shape(NamedTuple):
    """The size of a tree that is grown."""

    nodes: int  # verified per cycle, the root included
    depth: int  # most draft tokens on a path
    branch: int  # nodes expanded per level, and children of each

    def within(self, limit: Shape) -> Shape:
        """No larger than `limit` in anything."""
        return Shape(*map(min, self, limit))


@dataclass(frozen=True)
class CycleInput:
    """Where each row stands when a cycle begins."""

    tokens_B: Tensor  # int64; the newest token, emitted, not yet in any cache (0 in empty rows)
    position_B: Tensor  # int64; its absolute position = committed tokens of the row
    active_B: Tensor  # bool; False = an empty row, whatever stands in it is ignored
    sampling: tuple[Sampling, ...]  # each row's own; greedy in empty rows
    noise: GumbelNoise
    max_position: int  # the largest position, known to the host
    history_BV: Tensor | None = None  # bool; tokens in the row so far, root included; only when some row has a repetition penalty
    active_rows: tuple[int, ...] = ()  # the same, known to the host; filled by the Decoder
    row_tokens: tuple[Sequence[int], ...] = ()  # each row's tokens, root last, known to the host; the rows' own lists, which grow
    processors: tuple[tuple[Processor, ...], ...] = ()  # each row's logits processors; empty where no row has any
    eos: tuple[frozenset[int], ...] = ()  # each row's end-of-text tokens; nothing behind one is ever emitted
    remaining: tuple[int, ...] = ()  # how many tokens each row may still get
    tree_shape: Shape | None = None  # of a tree that is grown; None: as the drafter's options say
