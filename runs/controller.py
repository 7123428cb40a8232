"""`--tree auto` on a simulated machine: its speed over the best that stays the same throughout, and
over plain decoding.

    python runs/controller.py [--seeds 10] [--only TEXT] [--output FILE.json]
    python runs/controller.py --remembered [--seeds 10]

Each scenario is a machine (costs of a pass and a draft), a text and a head; tests/simulated.py says
what is made up. The best that stays the same is the fastest of 46 fixed trees, the fallback alone,
and plain decoding, chosen afterwards. Where a text changes midway, the controller can be faster
than that. docs/design/controller.md shows the table. Needs no model and no quiet machine.

--remembered: the first 100 cycles of a process over plain decoding, of one that knows nothing and of one that
begins with what 800 cycles of another process taught.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from _common import parser
from _markdown import table

from curves import LIMIT, curve
from eyas.adaptive import AdaptiveController
from eyas.adaptive.cost import Costs
from eyas.adaptive.memory import Remembered
from eyas.core.dormant import Policy
from eyas.core.drafter import TreeSize
from simulated import FALLBACK, FLAT, FixedPolicy, SimulatedMachine, controller

TREES = [
    TreeSize(nodes, depth, branch)
    for nodes in (2, 3, 4, 6, 8, 12, 16, 32)
    for depth in (1, 2, 3, 4, 5)
    for branch in (1, 2, 4)
    if depth < nodes <= 1 + branch + (depth - 1) * branch * branch
]
STEEP, MIDDLE, DEAR_LEVELS = curve(0.2, 0.1), curve(0.1, 0.05), curve(0.05, 0.2)
REFERENCE_SEEDS = 2


def useless(t: int) -> float:
    return 0.0


def half(t: int) -> float:
    return 0.55


def hiccups(t: int) -> float:
    """One cycle in fifty takes twenty times as long."""
    return 20.0 if (t * 2654435761) % 2**32 < 2**32 / 50 else 1.0


@dataclass(frozen=True)
class Scenario:
    """A machine and a text. `world`: arguments of SimulatedMachine."""

    costs: Costs
    cycles: int
    grows: bool = True  # whether the method's trees do
    fallback: bool = True
    world: dict[str, Any] = field(default_factory=dict)

    def run(self, policy: Policy, seed: int) -> SimulatedMachine:
        return SimulatedMachine(self.costs, seed=seed, **self.world).run(policy, self.cycles)

    def policy(self) -> Policy:
        return controller(self.costs, FALLBACK if self.fallback else None, self.grows)

    def best_fixed(self) -> float:
        """Speed-up of the best that stays the same."""
        policies: list[Policy] = [FixedPolicy(tree) for tree in (TREES if self.grows else [None])]
        policies += [FixedPolicy(None, FALLBACK)] if self.fallback else []
        seeds = range(1000, 1000 + REFERENCE_SEEDS)
        return max(1.0, *(float(np.mean([self.run(policy, seed).speedup() for seed in seeds])) for policy in policies))


def scenario(costs: Costs, cycles: int, grows: bool = True, fallback: bool = True, **world: Any) -> Scenario:
    return Scenario(costs, cycles, grows, fallback, world)


SCENARIOS: dict[str, Scenario] = {
    "useless head, cheap nodes": scenario(FLAT, 3000, fallback=False, skill=useless),
    "useless head, dear nodes": scenario(STEEP, 3000, fallback=False, skill=useless),
    "useless head and fallback, cheap nodes": scenario(FLAT, 3000, skill=useless),
    "useless head and fallback, dear nodes": scenario(STEEP, 3000, skill=useless),
    "useless head and fallback, dear drafts": scenario(curve(0.05, 0.4), 3000, skill=useless),
    "useless head and fallback, 400 cycles": scenario(FLAT, 400, skill=useless),
    "useless head, 12,000 cycles": scenario(FLAT, 12_000, fallback=False, skill=useless),
    "useless head, fallback guesses rarely": scenario(STEEP, 3000, skill=useless, guesses=lambda t: 0.1),
    "useless head, dear to wake": scenario(MIDDLE, 3000, skill=useless, waking=0.05),
    "useless head, hiccups": scenario(MIDDLE, 3000, skill=useless, pace=hiccups),
    "useless head, machine busy by turns": scenario(MIDDLE, 3000, skill=useless, pace=lambda t: 1.0 + t // 100 % 2),
    "useless method with a fixed tree": scenario(FLAT, 3000, grows=False, fallback=False, skill=useless),
    "good head, cheap nodes": scenario(FLAT, 1500, fallback=False),
    "good head, nodes and levels for nothing": scenario(curve(0.0, 0.02), 1500, fallback=False),
    "good head, middle": scenario(MIDDLE, 1500),
    "good head, dear levels": scenario(DEAR_LEVELS, 1500, fallback=False),
    "good head, dear nodes": scenario(STEEP, 1500, fallback=False),
    "good head, 300 cycles": scenario(MIDDLE, 300),
    "good head, texts differ": scenario(MIDDLE, 1500, moods=0.5),
    "good head, hiccups": scenario(MIDDLE, 1500, pace=hiccups),
    "good head, machine busy by turns": scenario(MIDDLE, 1500, pace=lambda t: 1.0 + t // 100 % 2),
    "good head, machine slower from 250 on": scenario(FLAT, 900, pace=lambda t: 2.0 if t >= 250 else 1.0),
    "good head, machine faster from 250 on": scenario(FLAT, 900, pace=lambda t: 1.0 if t >= 250 else 2.0),
    "good head, 8 rows": scenario(MIDDLE, 600, rows=8),
    "good method with a fixed tree": scenario(FLAT, 800, grows=False, fallback=False),
    "half a head, middle": scenario(MIDDLE, 1500, fallback=False, skill=half),
    "half a head, dear nodes": scenario(curve(0.12, 0.02), 1500, fallback=False, skill=half),
    "half a head, texts differ": scenario(MIDDLE, 1500, skill=half, moods=0.8),
    "half a head, seconds differ by 20 %": scenario(MIDDLE, 1500, skill=half, noise=0.2),
    "head that just pays": scenario(DEAR_LEVELS, 3000, skill=lambda t: 0.4),
    "method that just does not pay": scenario(MIDDLE, 3000, grows=False, skill=half),
    "fallback pays, head useless": scenario(FLAT, 3000, skill=useless, guesses=lambda t: 0.6, right=lambda t: 0.7),
    "fallback pays, 3 rows": scenario(FLAT, 1500, skill=useless, guesses=lambda t: 0.6, right=lambda t: 0.7, rows=3),
    "fallback better than a good head": scenario(MIDDLE, 2000, right=lambda t: 0.9),
    "fallback better than half a head": scenario(MIDDLE, 2000, skill=half, right=lambda t: 0.8),
    "head useless from 300 to 800": scenario(FLAT, 4000, skill=lambda t: 0.0 if 300 <= t < 800 else 1.0),
    "fallback useless from 1000 to 2000": scenario(
        FLAT, 5000, skill=useless, right=lambda t: 0.0 if 1000 <= t < 2000 else 0.7
    ),
    "useless head, 16 rows, 60 cycles": scenario(MIDDLE, 60, skill=useless, rows=16),
    "useless method with a fixed tree, 16 rows, 60 cycles": scenario(
        MIDDLE, 60, grows=False, fallback=False, skill=useless, rows=16
    ),
    "text right half the time, 4 rows, 60 cycles": scenario(MIDDLE, 60, skill=useless, right=lambda t: 0.5, rows=4),
    "text mostly right, 16 rows, 60 cycles": scenario(MIDDLE, 60, skill=useless, guesses=lambda t: 0.2, right=lambda t: 0.9, rows=16),
    "head good from 200 on, fallback until 1500": scenario(
        FLAT, 4000, skill=lambda t: 0.0 if t < 200 else 1.0, right=lambda t: 0.9 if t < 1500 else 0.0
    ),
}  # fmt: skip


def measure(chosen: dict[str, Scenario], seeds: int, policy: Callable[[Scenario], Policy]) -> list[dict[str, Any]]:
    """One row for each scenario."""
    rows = []
    for name, each in chosen.items():
        speedups = np.array([each.run(policy(each), seed).speedup() for seed in range(seeds)])
        best = each.best_fixed()
        row = {"scenario": name, "best_fixed_over_plain": best, "over_plain": speedups.tolist()}
        row |= {"over_best_mean": float((speedups / best).mean()), "over_best_least": float((speedups / best).min())}
        rows.append(row)
        print(f"| {name} | {best:.2f} | {row['over_best_mean']:.3f} | {row['over_best_least']:.3f} |", flush=True)
    return rows


class Kept:
    """A memory without a file."""

    def __init__(self) -> None:
        self.remembered: Remembered | None = None

    def read(self) -> Remembered | None:
        return self.remembered

    def is_due(self) -> bool:
        return True

    def keep(self, remembered: Remembered) -> None:
        self.remembered = remembered


def first_cycles(costs: Costs, rows: int, skill: float, seed: int) -> tuple[float, float]:
    """Return the speed of the first 100 cycles over plain decoding: without a memory, and with one."""
    kept: Any = Kept()
    world: dict[str, Any] = {"skill": lambda t: skill, "rows": rows, "moods": 0.5}

    def run(memory: Any, seed: int, cycles: int) -> float:
        policy = AdaptiveController(lambda: costs, LIMIT, fallback=FALLBACK, memory=memory)
        return SimulatedMachine(costs, seed=seed, **world).run(policy, cycles).speedup()

    run(kept, seed, 800)
    return run(None, 1000 + seed, 100), run(kept, 1000 + seed, 100)


def remembered(seeds: int) -> None:
    print(table(("a further node costs", "rows", "skill of the head", "without", "with"), ()), flush=True)
    for name, costs in (("0.2 of a pass", STEEP), ("0.1", MIDDLE), ("0.03", curve(0.03, 0.05))):
        for rows in (1, 4, 16):
            for skill in (0.2, 0.5, 1.0):
                pairs = [first_cycles(costs, rows, skill, seed) for seed in range(seeds)]
                means = (f"{sum(column) / seeds:.3f}" for column in zip(*pairs, strict=True))
                print("|", " | ".join((name, str(rows), str(skill), *means)), "|", flush=True)


def main() -> None:
    args = parser(
        __doc__,
        output=(None, "the record, JSON"),
        seeds=10,
        only=("", "scenarios whose name contains it"),
        remembered=(False, "what the next process gains from the last one"),
    ).parse_args()
    if args.remembered:
        return remembered(args.seeds)
    print(
        table(("scenario", "best fixed over plain", "auto over best fixed, mean", "least of the seeds"), ()), flush=True
    )
    chosen = {name: each for name, each in SCENARIOS.items() if args.only in name}
    rows = measure(chosen, args.seeds, Scenario.policy)
    if args.output:
        Path(args.output).write_text(json.dumps({"seeds": args.seeds, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
