"""The number of drafted nodes that a pass verifies. It is chosen for all rows together, by their expected yield
and by the time of a pass over that many tokens.

With R rows and the k most probable nodes of all rows, a cycle is expected to make

    rate(k)  =  (R + sum of their chances) / seconds(R + k)                tokens a second

and the k of the highest rate is chosen; none, where no k is MIN_GAIN times better than plain
decoding, or than a method that would draft otherwise. A node's chance includes the chances of the nodes above
it, so a parent is never left out for its child.

`PassSeconds` begins with the costs that were measured (cost.py). The real time of cycles corrects them, because
the machine is busy at times and texts grow.

This module knows no method. Letters: R rows, K numbers of nodes, G sizes of passes that were measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

__all__ = ["Array", "NodeChoice", "PassSeconds"]

MIN_GAIN = 1.02  # the expected rate with drafts over that of plain decoding, from which on they are verified
MOST_NODES = 256  # most nodes below the roots, of all rows together
PADDED = (0, 1, 2, 4, 8, 16, 32, 64)  # nodes below the root of a row, where rows are padded (`core.tree.padded_nodes`)
CORRECTIONS = 9  # cycles whose median corrects a measured pass
CORRECT_EVERY = 8  # cycles from one correction to the next
CORRECTED_FROM = 3  # cycles from which on a size has a correction of its own
FORGOTTEN_AFTER = 256  # cycles without a pass of that size, after which the correction is forgotten
FAR = 64  # times the largest measured pass: up to there its slope goes on

Array = np.ndarray[Any, Any]


class PassSeconds:
    """Seconds of a cycle by the tokens of its pass.

    A cycle takes milliseconds, so it only notes its time; now and then the notes correct the plan.

    Args:
        tokens: the sizes of passes that were measured, ascending.
        seconds: their time.
    """

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else seconds[0] / tokens[0]
        self._tokens_G = np.array([*tokens, FAR * tokens[-1]])
        self._measured_G = np.array([*seconds, seconds[-1] + max(0.0, slope) * (FAR - 1) * tokens[-1]])
        self._seconds_G = self._measured_G
        self._ratios = [deque[float](maxlen=CORRECTIONS) for _ in self._tokens_G]
        self._seen_at = [0] * len(self._ratios)  # number of the last cycle of each size
        self._cycles = 0
        self._places = dict[int, tuple[int, float]]()  # by tokens: the next measured size, and the seconds by the costs
        self._choices = dict[tuple[int, bool, float], NodeChoice]()  # made since the last correction

    def __call__(self, tokens_K: Array) -> Array:
        seconds_K: Array = np.interp(tokens_K, self._tokens_G, self._seconds_G)
        return seconds_K

    def pace(self, tokens: int) -> float:
        """Return the present time of such passes divided by the measured time."""
        return float(self(np.array(tokens)) / np.interp(tokens, self._tokens_G, self._measured_G))

    def choice(self, rows: int, padded: bool, rival: float = 0.0) -> NodeChoice:
        """Return a `NodeChoice` with these arguments, made anew only after a correction."""
        key = rows, padded, rival
        if key not in self._choices:
            self._choices[key] = NodeChoice(self, rows, padded, rival)
        return self._choices[key]

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a cycle whose pass had so many tokens; not from the first of a size, which includes one-off
        work, such as measuring the costs."""
        if tokens not in self._places:
            place = int(np.searchsorted(self._tokens_G, tokens))
            self._places[tokens] = place, float(np.interp(tokens, self._tokens_G, self._measured_G))
        place, measured = self._places[tokens]
        self._cycles += 1
        ratios = self._ratios[place]
        if self._seen_at[place]:
            ratios.append(seconds / measured)
        self._seen_at[place] = self._cycles
        if len(ratios) == CORRECTED_FROM or self._cycles % CORRECT_EVERY == 0:
            self._correct()

    def _correct(self) -> None:
        correction, corrections = 1.0, list[float]()
        for ratios, seen_at in zip(self._ratios, self._seen_at, strict=True):
            if self._cycles - seen_at > FORGOTTEN_AFTER:
                ratios.clear()
            # a size that did not occur is corrected like the next smaller one
            correction = median(ratios) if len(ratios) >= CORRECTED_FROM else correction
            corrections.append(correction)
        self._seconds_G = np.maximum.accumulate(self._measured_G * corrections)
        self._choices.clear()


class NodeChoice:
    """The choice for one cycle: a `core.drafter.NodeChooser`.

    Args:
        rows: the rows in flight.
        padded: whether every row takes the time of the largest tree's nodes.
        rival: tokens a second, of all rows, of the method that drafts if this one does not.
    """

    def __init__(self, seconds: PassSeconds, rows: int, padded: bool, rival: float = 0.0) -> None:
        self.rows, self.padded = rows, padded
        # nodes below all roots, padding included
        nodes_K = np.array(PADDED) * rows if padded else np.arange(MOST_NODES + 1)
        seconds_K = seconds(rows + nodes_K)
        # expected tokens that make up for the time of so many nodes
        break_even_K = seconds_K * max(rows / seconds_K[0], rival) * MIN_GAIN - rows
        self.least = float((break_even_K[1:] / nodes_K[1:]).min())  # see `NodeChooser`
        self._seconds: list[float] = seconds_K.tolist()
        self._break_even: list[float] = break_even_K.tolist()

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many nodes each row verifies, from the chances of its nodes in the order of the tree."""
        if self.padded:
            accepted = [sum(sum(row[:count]) for row in chances) for count in PADDED]
            count = PADDED[self._best(accepted)]
            return [min(len(row), count) for row in chances]
        # stable: nodes of a row stay in their order
        ranked = sorted(((chance, row) for row, each in enumerate(chances) for chance in each), key=lambda n: -n[0])
        accepted = list(accumulate((chance for chance, _ in ranked[:MOST_NODES]), initial=0.0))
        counts = [0] * len(chances)
        for _, row in ranked[: self._best(accepted)]:
            counts[row] += 1
        return counts

    def _best(self, accepted: Sequence[float]) -> int:
        """Return the place of the highest rate; 0: no nodes."""
        rates = [(self.rows + tokens) / seconds for tokens, seconds in zip(accepted, self._seconds, strict=False)]
        best = rates.index(max(rates))
        return best if accepted[best] > self._break_even[best] else 0
