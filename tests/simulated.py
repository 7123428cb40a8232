"""A simulated machine, text and draft, on which controllers are tested and compared; seconds are made up."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from curves import LIMIT, curve, drafted
from eyas.adaptive import AdaptiveController
from eyas.adaptive.cost import Costs
from eyas.core.dormant import Decision, Policy
from eyas.core.drafter import CycleInput, TreeSize
from eyas.core.requests import Step
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.tree import Draft, Tree

OWN_TREE = TreeSize(8, 3, 2)  # of methods whose trees do not grow
FLAT = curve(0.02, 0.05)  # large trees pay, if the head is any good
GREEDY = Sampling()
FALLBACK: Any = object()  # guesses chains of up to eight tokens, by `SimulatedMachine`

Course = Callable[[int], float]  # a quantity by the number of the cycle


@cache
def cycle_of(rows: int = 1, sampling: Sampling = GREEDY) -> CycleInput:
    """The beginning of a cycle, as far as a controller reads it."""
    zeros_B = torch.zeros(rows, dtype=torch.long)
    samplings = (sampling,) * rows
    noise = GumbelNoise.from_sampling(samplings)
    return CycleInput(zeros_B, zeros_B, zeros_B == 0, samplings, noise, 0, active_rows=tuple(range(rows)))


@cache
def tree_of(seed: int, shape: TreeSize) -> tuple[dict[int, list[tuple[int, float]]], Draft]:
    """A drafted tree: by node, its children with their confidences; and the draft."""
    parents, values = drafted(seed, shape)
    tree = Tree.build(torch.tensor([parents]), shape.depth)
    children: dict[int, list[tuple[int, float]]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            confidence = float(np.exp(values[node] - values[parent]))
            children.setdefault(parent, []).append((node, confidence))
    return children, Draft(tree, torch.zeros_like(tree.parents_BN), value_BN=torch.tensor([values]))


@dataclass
class SimulatedMachine:
    """Cycles take seconds by `costs`, times `pace`, with a little noise. Quantities of the type
    Course change with the cycle.

    skill: what the head's confidences must be multiplied with to be right. guesses, right: the share of cycles in which
    the text has a guess, and the chance of each of its tokens. moods: how much skill differs between stretches of 25
    cycles, as between texts. waking: seconds for each token that the head missed while it was dormant, up to 512.
    prompts: tokens of new prompts for each token that is decoded; they come in prompts of 64 tokens. reading: seconds
    that the head takes for each token of a prompt, if it is not dormant.
    """

    costs: Costs = FLAT
    skill: Course = lambda t: 1.0
    pace: Course = lambda t: 1.0
    rows: int = 1
    guesses: Course = lambda t: 1.0
    right: Course = lambda t: 0.0
    moods: float = 0.0
    waking: float = 0.01
    prompts: float = 0.0
    reading: float = 0.0
    noise: float = 0.03
    seed: int = 0
    decisions: list[Decision] = field(default_factory=list)
    per_cycle: list[tuple[int, float]] = field(default_factory=list)  # tokens of all rows; seconds at a pace of 1

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.mood_rng = random.Random(self.seed + 1000)
        self.missed = 0
        self.asked = 0.0  # tokens of the next prompt
        self.mood = 1.0

    def run(self, policy: Policy, cycles: int) -> "SimulatedMachine":
        for _ in range(cycles):
            t = len(self.decisions)
            if self.moods and t % 25 == 0:
                self.mood = self.mood_rng.uniform(1 - self.moods, 1 + self.moods)
            decision = policy.decide(cycle_of(self.rows))
            counts = self._guesses(decision, t)
            if decision.otherwise is not None and max(counts) == 1:
                decision = decision.otherwise
            self.decisions.append(decision)
            seconds = self._seconds(decision, counts) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            steps = [self._step(row, decision, seconds * self.pace(t), counts) for row in range(self.rows)]
            tokens = sum(len(step.path) for step in steps)
            self.missed = 0 if decision.drafts_every_row else min(512, self.missed + tokens)
            policy.observe(steps)
            seconds += self._read_prompts(policy, tokens)
            self.per_cycle.append((tokens, seconds))
        return self

    def _read_prompts(self, policy: Policy, tokens: int) -> float:
        """Prompts that come while so many tokens are decoded: the head's seconds."""
        self.asked += tokens * self.prompts
        seconds = 0.0
        while self.asked >= 64:
            self.asked -= 64
            dormant = policy.is_dormant(self.rows)
            policy.observe_prompt(64, None if dormant else 64 * self.reading)
            seconds += 0.0 if dormant else 64 * self.reading
        return seconds

    def _guesses(self, decision: Decision, t: int) -> list[int]:
        """The nodes of each row that the text drafts, the root included."""
        if decision.fallback is None:
            return [1] * self.rows
        right = self.right(t)
        chances = [
            [right ** (n + 1) for n in range(8)] if self.rng.random() < self.guesses(t) else []
            for _ in range(self.rows)
        ]
        chosen = [len(row) for row in chances] if decision.chooser is None else decision.chooser.choose(chances)
        return [1 + count for count in chosen]

    def _seconds(self, decision: Decision, counts: Sequence[int]) -> float:
        if decision.drafts_every_row:
            return self.costs.cycle(decision.tree_size or OWN_TREE, self.rows) + self.waking * self.missed
        return self.costs.plain(sum(counts))

    def _step(self, row: int, decision: Decision, seconds: float, counts: Sequence[int]) -> Step:
        t, length, draft = len(self.decisions) - 1, 1, None
        if decision.drafts_every_row:
            path, draft = self._accept(tree_of(self.rng.randrange(40), decision.tree_size or OWN_TREE), t)
            return Step(0, (0,), None, path, draft, 0, seconds, decision=decision)
        if decision.fallback is not None:
            tree = replace(Tree.chain(self.rows, max(counts)), counts=tuple(counts))
            draft = Draft(tree, torch.zeros(self.rows, max(counts), dtype=torch.long))
            while length < counts[row] and self.rng.random() < self.right(t):
                length += 1
        return Step(0, (0,), None, tuple(range(length)), draft, row, seconds, decision=decision)

    def _accept(self, tree: tuple[dict[int, list[tuple[int, float]]], Draft], t: int) -> tuple[tuple[int, ...], Draft]:
        children, draft = tree
        skill, path = min(1.0, self.skill(t) * self.mood), [0]
        while path[-1] in children:
            chance = self.rng.random()
            for node, confidence in children[path[-1]]:
                chance -= skill * confidence
                if chance < 0:
                    path.append(node)
                    break
            else:
                break
        return tuple(path), draft

    def speedup(self, since: int = 0) -> float:
        """Over plain decoding at the same pace."""
        tokens = sum(n for n, _ in self.per_cycle[since:])
        seconds = sum(s for _, s in self.per_cycle[since:])
        return tokens / seconds * self.costs.plain(self.rows) / self.rows

    def share(self, why: str, since: int = 0, until: int | None = None) -> float:
        """The share of cycles that were decided so: base, draft."""
        decisions = self.decisions[since:until]
        return sum(decision.arm == why for decision in decisions) / len(decisions)


class FixedPolicy(Policy):
    """The same decision for every cycle."""

    def __init__(self, shape: TreeSize | None, fallback: Any = None) -> None:
        self.decision = Decision(shape, fallback=fallback)

    def decide(self, cycle: CycleInput) -> Decision:
        return self.decision

    def observe(self, steps: Sequence[Step]) -> None:
        pass


def controller(costs: Costs = FLAT, fallback: Any = None, grows: bool = True) -> AdaptiveController:
    """Makes the controller of a method whose trees grow, or do not."""
    if not grows:
        first = (costs.draft(OWN_TREE.depth, OWN_TREE.branch),)
        own = replace(costs, own_nodes=OWN_TREE.nodes, branches=(1,), first=first, deeper=(0.0,))
        return AdaptiveController(lambda: own, fallback=fallback)
    return AdaptiveController(lambda: costs, LIMIT, fallback=fallback)
