"""Held-out figures from real decoding: acceptance by depth along a chain (the n-alpha of EAGLE-1, section 5), and tokens per cycle.

n-alpha is the rate at which the (n+1)-th draft token of a chain is accepted, given that the n before it were: its input held n of the
draft's own features. tau is what the drafter reaches with its own tree. Knows no method: a drafter says itself how it drafts a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.core.engine import Decoder, Request, Step
from eyas.drafters import Drafter
from eyas.metrics import StepTotals, cycle_of, n_alpha
from eyas.train.data import Example

__all__ = ["chain_figures", "figures_of", "last_prompt"]


def figures_of(steps: Sequence[Step], depth: int) -> dict[str, float]:
    """n-alpha for n = 0..depth-1, as far as drafts reached, and tau ("chain tau"), of the Steps of chains."""
    cycles = [cycle_of(step) for step in steps if not step.prefill]
    return {**n_alpha(cycles, depth), "chain tau": _tau(steps)} if steps else {}


def _tau(steps: Sequence[Step]) -> float:
    """Tokens that a cycle emits."""
    totals = StepTotals()
    for step in steps:
        totals.add(step)
    return totals.tau


def last_prompt(example: Example) -> tuple[int, ...]:
    """The tokens before the last stretch that counts: what the assistant was to answer last. Of plain text, where all counts, half."""
    end = len(example.ids)
    if all(example.counted):
        return tuple(example.ids[: end // 2])
    while end and not example.counted[end - 1]:
        end -= 1
    while end and example.counted[end - 1]:
        end -= 1
    return tuple(example.ids[:end])


def chain_figures(
    examples: Sequence[Example], eos: frozenset[int] = frozenset(), prompts: int = 16, new_tokens: int = 48, depth: int = 5,
    tree_prompts: int = 4,
) -> Callable[[Drafter], dict[str, float]]:  # fmt: skip
    """Held-out figures for the training loop, from greedy answers to some prompts.

    Args:
        prompts: of how many examples; drafted by chains of `depth`, or as deep as the drafter can.
        tree_prompts: of how many of them once more with the drafter's own tree, whose cycles cost more; 0 = none.
    """
    chosen = [p for p in (last_prompt(e) for e in examples[:prompts]) if p]

    def evaluate(drafter: Drafter) -> dict[str, float]:
        figures = figures_of(_decoded(drafter.chain(depth), chosen, new_tokens, eos), depth)
        own = _decoded(drafter, chosen[:tree_prompts], new_tokens, eos)
        return {**figures, "tau": _tau(own)} if own else figures

    return evaluate


def _decoded(drafter: Drafter, prompts: Sequence[tuple[int, ...]], new_tokens: int, eos: frozenset[int]) -> list[Step]:
    """The steps of greedy decoding, prompt after prompt."""
    steps: list[Step] = []
    for prompt in prompts:
        room = drafter.target.context - len(prompt)
        if room < 1:
            continue
        decoder = Decoder(drafter.target, drafter)
        decoder.add(Request(prompt, min(new_tokens, room), eos=eos))
        while not decoder.finished:
            steps += decoder.step()
    return steps
