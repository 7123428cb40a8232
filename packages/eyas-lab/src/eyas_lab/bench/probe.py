"""n-alpha: the acceptance of chains of CHAIN draft tokens, in a separate run. It measures no time.

`Drafter.chain` gives the chain of a method, drawn as the method draws at each temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from eyas.drafters import DraftMethod
from eyas_lab.bench.contestants import Drafting, Question
from eyas_lab.bench.run import Bench
from eyas_lab.metrics import acceptance_by_depth

__all__ = ["CHAIN", "chain_alpha", "probe"]

CHAIN = 5  # draft tokens of a chain: n-alpha for n = 0..4
NEW_TOKENS = 64  # most tokens of a probed answer


def probe(bench: Bench, prompts: int) -> Iterator[tuple[str, list[float | None]]]:
    """Yield (contestant and temperature, its n-alpha) from `prompts` of the bench's prompts, spread evenly: the
    beginnings of first turns."""
    chosen = bench.prompts[:: max(1, len(bench.prompts) // max(1, prompts))][:prompts]
    for temperature in bench.temperatures if chosen else ():
        questions = [_short(next(bench.questions(prompt, temperature))) for prompt in chosen]
        for contestant in bench.contestants:
            if not isinstance(contestant, Drafting) or contestant.name in bench.failed:
                continue
            if rates := chain_alpha(contestant, questions):
                yield contestant.name + (f", T = {temperature:g}" if len(bench.temperatures) > 1 else ""), rates


def _short(question: Question) -> Question:
    request = question.request
    return replace(question, request=replace(request, max_new_tokens=min(request.max_new_tokens, NEW_TOKENS)))


def chain_alpha(contestant: Drafting, questions: Sequence[Question]) -> list[float | None] | None:
    """Return n-alpha for n = 0..4; None for a method that drafts no chains."""
    try:
        chain = contestant.drafter.chain(CHAIN) if isinstance(contestant.drafter, DraftMethod) else None
    except NotImplementedError:
        return None
    if chain is None:
        return None
    cycles = [cycle for question in questions for cycle in Drafting(contestant.name, chain).answer(question).cycles]
    return [None if rate is None else round(rate, 4) for rate in acceptance_by_depth(cycles, CHAIN)]
