"""Passes, drafts, c, tau and speed-ups of a target with a head on a machine.

This module knows no clock and no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eyas.core.drafter import TreeSize
from eyas_lab.predict.heads import Head
from eyas_lab.predict.machines import Machine
from eyas_lab.predict.models import WEIGHT_BYTES, Model
from eyas_lab.predict.speedup import Outcome, outcomes, tau_of

__all__ = ["Pass", "Prediction", "Settings", "TreePrediction", "weights_of"]

LIMIT = TreeSize(60, 8, 10)  # the largest tree, as the methods have it
TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of the passes that are shown
COST_ERROR = 0.10  # deviation of c: half of what docs/lab/predict.md found as the largest usual miss
TAU_ERROR = 0.05  # of tau, given the acceptance (speedup.py)
DEVIATIONS = 2.0  # of an interval's ends from its middle


@dataclass(frozen=True)
class Settings:
    """Settings of a prediction."""

    weights: str = "auto"  # format of the target's weights; auto: the checkpoint's
    rows: int = 1  # requests at a time
    context: int = 512  # committed tokens of a row
    limit: TreeSize = LIMIT


def weights_of(asked: str, usual: str) -> str:
    """Return the format of the weights that is asked for; for "auto" the usual one, or bfloat16 for one that is not
    known here."""
    weights = usual if asked == "auto" else asked
    return weights if weights in WEIGHT_BYTES else "bfloat16"


@dataclass(frozen=True)
class Pass:
    """A pass of the target over some tokens of each row."""

    tokens: int
    bytes: float
    flops: float
    seconds: float
    bound: str  # "bytes" or "flops": which of them takes longer


@dataclass(frozen=True)
class TreePrediction:
    """Predicted figures of one tree."""

    tree: TreeSize
    tau: float
    draft_seconds: float
    pass_seconds: float
    c: float
    speedup: float
    low: float
    high: float


class Prediction:
    """The costs of cycles by arithmetic (`speedup.CycleCosts`), and their consequences."""

    def __init__(self, model: Model, machine: Machine, head: Head, settings: Settings) -> None:
        self.model, self.machine, self.head = model, machine, head
        self.settings = replace(settings, weights=weights_of(settings.weights, model.dtype))
        self.weight_bytes = WEIGHT_BYTES[self.settings.weights]

    # --- seconds ---

    def pass_of(self, tokens: int) -> Pass:
        """Return a pass over so many tokens of each row."""
        rows, machine, model = self.settings.rows, self.machine, self.model
        together = rows * tokens
        weights = self.weight_bytes * model.read(together)
        keys = rows * machine.number_bytes * model.keys(self.settings.context)
        flops = model.flops(together, self.settings.context)
        seconds, bound = machine.seconds(weights + keys, flops, self.settings.weights, together, weights)
        overhead = machine.pass_seconds + model.layers * machine.layer_seconds
        return Pass(tokens, weights + keys, flops, seconds + overhead, bound)

    def plain(self) -> float:
        """Return the seconds of a cycle without a draft."""
        return self.pass_of(1).seconds + self.machine.cycle_seconds

    def draft(self, size: TreeSize) -> float:
        """Return the seconds of a draft. Its first level reads the tokens that the last cycle emitted."""
        head, machine = self.head, self.machine
        if head.chain_only:
            return 0.0
        rows = self.settings.rows
        pending = rows * tau_of(size, head.acceptance.by_depth)
        # the target's pass has been through the caches since the last draft; the levels follow each other
        every = self.weight_bytes * self.model.weights
        once = self._read(head.once, 0, pending, every) if head.once else 0.0
        first = self._read(head.level, head.shared, pending, every)
        deeper = self._read(head.level, head.shared, rows * size.branch, 0.0)
        levels = size.depth * (machine.level_seconds + head.layers * machine.layer_seconds)
        return machine.draft_seconds + once + first + (size.depth - 1) * deeper + levels

    def _read(self, own: int, shared: int, tokens: float, between: float) -> float:
        """Return the seconds in which weights of the head, and of the target's output matrix, multiply tokens.

        Args:
            between: bytes of other weights that were read since the last time.
        """
        machine, settings = self.machine, self.settings
        keys = settings.rows * machine.number_bytes * self.head.stored * settings.context
        own_bytes, shared_bytes = machine.draft_bytes * own, self.weight_bytes * shared
        resident = own_bytes + shared_bytes + between
        seconds, _ = machine.seconds(own_bytes + keys, 2 * tokens * own, "draft", tokens, resident)
        if shared:
            seconds += machine.seconds(shared_bytes, 2 * tokens * shared, settings.weights, tokens, resident)[0]
        return seconds

    def cycle(self, size: TreeSize) -> float:
        """Return the seconds of a cycle with a tree of this size in each row."""
        return self.pass_of(size.nodes).seconds + self.draft(size) + self.machine.draft_cycle_seconds

    # --- what follows ---

    def trees(self, count: int) -> list[TreePrediction]:
        """Return the best trees of different numbers of nodes, the fastest first."""
        limit = self.settings.limit
        limit = limit._replace(branch=1) if self.head.chain_only else limit
        best: dict[int, Outcome] = {}
        for outcome in outcomes(self, limit, self.head.acceptance.by_depth):
            nodes = outcome.tree.nodes
            if nodes not in best or outcome.drafted > best[nodes].drafted:
                best[nodes] = outcome
        ranked = sorted(best.values(), key=lambda outcome: -outcome.drafted)
        return [self._tree(outcome) for outcome in ranked[:count]]

    def of_tree(self, size: TreeSize) -> TreePrediction:
        """Return what to expect of one tree."""
        tau, cost = tau_of(size, self.head.acceptance.by_depth), self.cycle(size) / self.plain()
        return self._tree(Outcome(size, tau, cost, tau / cost))

    def _tree(self, outcome: Outcome) -> TreePrediction:
        size, error = outcome.tree, DEVIATIONS * math.hypot(COST_ERROR, TAU_ERROR)
        low, high = (
            tau_of(size, self.head.acceptance.moved(sign * DEVIATIONS)) / outcome.cost * (1 + sign * error)
            for sign in (-1, 1)
        )
        seconds = self.draft(size), self.pass_of(size.nodes).seconds
        return TreePrediction(size, outcome.tau, *seconds, outcome.cost, outcome.drafted, low, high)

    def verdict(self, trees: Sequence[TreePrediction]) -> str:
        """Return one line that says what to expect."""
        best, name = trees[0], self.head.method
        shape = f"{best.tree.nodes} nodes in {best.tree.depth} levels"
        figures = f"{best.speedup:.2f} times as fast ({best.low:.2f} to {best.high:.2f}) with {name}, {shape}"
        if best.low >= 1:
            return f"drafting pays: {figures}"
        if best.high <= 1 or best.speedup <= 1:
            return f"drafting is not expected to pay: {figures}"
        return f"drafting may pay: {figures}"

    def chains(self) -> Iterator[tuple[int, float, float]]:
        """Yield (depth, acceptance given all before, tau of a chain so deep)."""
        by_depth = self.head.acceptance.by_depth
        for depth in range(1, self.settings.limit.depth + 1):
            yield depth, by_depth[min(depth, len(by_depth)) - 1], tau_of(TreeSize(depth + 1, depth, 1), by_depth)

    def to_json(self, count: int) -> dict[str, Any]:
        """Return all of it as `json` writes it."""
        trees = self.trees(count)
        plain = self.plain()
        return {
            "target": {**asdict(self.model), "weights": self.model.weights},
            "machine": asdict(self.machine),
            "draft": asdict(self.head),
            "settings": asdict(self.settings),
            "passes": [asdict(self.pass_of(tokens)) for tokens in TOKENS],
            "plain": {"seconds": plain, "tokens_per_second": self.settings.rows / plain},
            "depths": [dict(zip(("depth", "acceptance", "tau"), chain, strict=True)) for chain in self.chains()],
            "trees": [{**asdict(tree), "tree": tree.tree._asdict()} for tree in trees],
            "verdict": self.verdict(trees),
        }
