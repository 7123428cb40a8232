"""Held-out figures from real decoding: acceptance by depth along a chain (the n-alpha of EAGLE-1, section 5), and tokens per cycle.

n-alpha is the rate at which the (n+1)-th draft token of a chain is accepted, given that the n before it were: its input held n of the
draft's own features. tau is what the drafter reaches with its own tree. Knows no method: a drafter says itself how it drafts a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eyas.core.engine import Decoder, Request, Step
from eyas.drafters import Drafter
from eyas.train.data import Example

__all__ = ["acceptance_by_depth", "chain_figures", "figures_of", "last_prompt", "tau_of"]


def acceptance_by_depth(steps: Iterable[Step], depth: int) -> list[tuple[int, int]]:
    """For each draft depth 1..depth of chain cycles: (times reached, times accepted). What was not drafted, or cut off at the end, was not
    reached.
    """
    reached, accepted = [0] * depth, [0] * depth
    for step in steps:
        if step.prefill:
            continue
        for d in range(min(step.accepted, depth)):
            reached[d] += 1
            accepted[d] += 1
        bonus = len(step.tokens) > step.accepted  # it was emitted, so the next draft token, if there was one, was refused
        if bonus and step.accepted < min(depth, _drafted(step)):
            reached[step.accepted] += 1
    return list(zip(reached, accepted, strict=True))


def _drafted(step: Step) -> float:
    """How many draft tokens the longest path had; of a Step that does not hold its draft it is not known, and taken to be enough."""
    if step.draft is None:
        return float("inf")
    tree, row = step.draft.tree, step.row
    return int(tree.depth_BN[row][tree.candidate_BN[row]].max())


def figures_of(steps: Sequence[Step], depth: int) -> dict[str, float]:
    """n-alpha for n = 0..depth-1, as far as drafts reached, and tau, tokens emitted per cycle, of chain cycles."""
    rates = {f"{n}-alpha": a / r for n, (r, a) in enumerate(acceptance_by_depth(steps, depth)) if r}
    return {**rates, "chain tau": tau_of(steps)} if steps else {}


def tau_of(steps: Sequence[Step]) -> float:
    """Tokens emitted per cycle; the prefill's token is no cycle's."""
    cycles = [s for s in steps if not s.prefill]
    return sum(len(s.tokens) for s in cycles) / max(1, len(cycles))


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
        return {**figures, "tau": tau_of(own)} if own else figures

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
