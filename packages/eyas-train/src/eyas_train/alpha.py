"""Held-out figures from real decoding: n-alpha along a chain (EAGLE-1, section 5), and tau.

n-alpha is the acceptance rate of the (n+1)-th draft token of a chain, given that the n before it were accepted.
So n of the features that it was drafted from were the draft's own. tau is measured with the drafter's own tree.
This module knows no method: each drafter knows how it drafts a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.core.engine import Decoder, Request, Step
from eyas.core.requests import check_steps
from eyas.core.totals import StepTotals
from eyas.drafters import DraftMethod
from eyas_lab.metrics import cycle_of, n_alpha
from eyas_train.data import Example


def chain_figures(
    examples: Sequence[Example],
    eos: frozenset[int] = frozenset(),
    prompts: int = 16,
    new_tokens: int = 48,
    depth: int = 5,
    tree_prompts: int = 4,
) -> Callable[[DraftMethod], dict[str, float]]:
    """Return held-out figures for the training loop, from greedy answers to the prompts of some examples.

    Args:
        eos: tokens that end an answer.
        prompts: number of examples that are decoded with chains of `depth` draft tokens, or as
            deep as the drafter can.
        new_tokens: most tokens of an answer.
        tree_prompts: number of these examples that are decoded again with the drafter's own tree,
            whose cycles cost more.

    Returns:
        A function of the drafter, whose result has "0-alpha", "1-alpha", ... as far as drafts
        reached, "chain tau" and "tau".
    """
    chosen = [prompt for prompt in map(last_prompt, examples[:prompts]) if prompt]

    def evaluate(drafter: DraftMethod) -> dict[str, float]:
        figures: dict[str, float] = {}
        if chain_steps := _decode(drafter.chain(depth), chosen, new_tokens, eos):
            cycles = [cycle_of(step) for step in chain_steps if not step.prefill]
            figures = {**n_alpha(cycles, depth), "chain tau": _tau(chain_steps)}
        if tree_steps := _decode(drafter, chosen[:tree_prompts], new_tokens, eos):
            figures["tau"] = _tau(tree_steps)
        return figures

    return evaluate


def last_prompt(example: Example) -> tuple[int, ...]:
    """Return the tokens before the last run of counted tokens: the prompt of the assistant's last reply.

    For plain text, where all tokens count, it is the first half.
    """
    end = len(example.ids)
    if all(example.counted):
        return tuple(example.ids[: end // 2])
    for counts in (False, True):  # what follows the reply, then the reply
        while end and example.counted[end - 1] is counts:
            end -= 1
    return tuple(example.ids[:end])


def _decode(
    drafter: DraftMethod, prompts: Sequence[tuple[int, ...]], new_tokens: int, eos: frozenset[int]
) -> list[Step]:
    """Return the Steps of greedy decoding, prompt after prompt. Prompts that fill the context are
    left out.
    """
    steps: list[Step] = []
    for prompt in prompts:
        if (room := drafter.target.context - len(prompt)) > 0:
            decoder = Decoder(drafter.target, drafter)
            decoder.add(Request(prompt, min(new_tokens, room), eos=eos))
            while not decoder.finished:
                steps += check_steps(decoder.step())
    return steps


def _tau(steps: Sequence[Step]) -> float:
    totals = StepTotals()
    for step in steps:
        totals.add(step)
    return totals.tau
