"""Measure JSON-schema generation of the embedded model: with and without drafts of forced text, and
drafts that know the constraint.

    python runs/structured_output.py --output docs/results/structured_output.json

Every variant answers every prompt in every round, in an order that is drawn anew; the ids of all
variants are compared. "levels": a head's children are ranked among the allowed tokens, level by
level (what eyas does). "none": the head knows nothing of the constraint, and grows its tree in one
call of the kernels. Times are of the process on one thread, so that other programs on the machine
matter little.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from _common import parser, run, write

import eyas
from eyas.core.drafter import CycleInput
from eyas.core.tree import Draft
from eyas.drafters import _eagle
from eyas.drafters._grow import DraftNetSteps, DynamicTree, grow_dynamic
from eyas.grammar import GrammarConstraint

PROMPTS = (
    "I want to book a table for two in San Jose tonight.",
    "Can you tell me what the weather is like?",
    "I would like to see a movie tonight.",
    "My name is Anna and I have a dog in Berlin.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "kind", "city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
TREES = {"6/3/2": {"nodes": 6, "depth": 3, "branch": 2}, "8/4/3": {"nodes": 8, "depth": 4, "branch": 3}}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 1": {"temperature": 1.0, "seed": 3}}


@contextmanager
def drafting(knows: str, forced: bool) -> Iterator[None]:
    """Drafts with ("levels") or without ("none") masks, and with or without forced text."""

    def unknowing(growth: DraftNetSteps, cycle_input: CycleInput, tree: DynamicTree) -> Draft:
        return grow_dynamic(growth, replace(cycle_input, features=()), tree)

    own_forced = GrammarConstraint.forced
    with (
        patch.object(_eagle, "grow_dynamic", unknowing if knows == "none" else grow_dynamic),
        patch.object(GrammarConstraint, "forced", own_forced if forced else lambda self, limit: []),
    ):
        yield


def main() -> None:
    args = parser(__doc__, rounds=5, tokens=80).parse_args()
    torch.set_num_threads(1)
    models = {"plain": eyas.load(method="vanilla"), "suffix": eyas.load(method="suffix", tree="fixed")}
    models |= {f"eagle3 {name}": eyas.load(method="eagle3", tree=tree) for name, tree in TREES.items()}
    variants = [
        (m, knows, forced)
        for m in models
        for knows in (("none", "levels") if "eagle" in m else ("none",))
        for forced in (False, True)
    ]
    tasks = [(variant, sampling, prompt) for variant in variants for sampling in SAMPLINGS for prompt in PROMPTS]
    sums: dict[tuple[Any, str], dict[str, float]] = defaultdict(lambda: {"tokens": 0, "cycles": 0, "seconds": 0.0})
    ids: dict[tuple[str, str], tuple[int, ...]] = {}
    for number in range(args.rounds + 1):
        random.Random(number).shuffle(tasks)
        for (model, knows, forced), sampling, prompt in tasks:
            with drafting(knows, forced):
                began = time.process_time()
                limits = {"max_new_tokens": args.tokens, "response_format": FORMAT}
                result = models[model].generate(prompt, **limits, **SAMPLINGS[sampling])
                seconds = time.process_time() - began
            first = ids.setdefault((sampling, prompt), result.token_ids)
            assert first == result.token_ids, "the ids depend on the drafts"
            if number:  # the first round compiles grammars and meets their states
                one = sums[(model, knows, forced), sampling]
                one["tokens"] += len(result.token_ids)
                one["cycles"] += result.stats.cycles
                one["seconds"] += seconds
    rows = [
        {
            "method": model, "draft_knows": knows, "forced": forced, "sampling": sampling,
            "tau": round(one["tokens"] / one["cycles"], 2), "tokens_per_second": round(one["tokens"] / one["seconds"], 1),
            "ms_per_cycle": round(1e3 * one["seconds"] / one["cycles"], 2),
        }
        for ((model, knows, forced), sampling), one in sorted(sums.items())
    ]  # fmt: skip
    write(args.output, {"schema": SCHEMA, "results": rows})


if __name__ == "__main__":
    run(main)
