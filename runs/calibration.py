"""Which confidence temperature fits a head's drafts at each depth of a chain, greedily and at T = 1.

    python runs/calibration.py --chats HELDIN.jsonl.gz --limit 100 --output docs/results/calibration.json          the embedded EAGLE-3 head
    python runs/calibration.py --method eagle2 --draft HEAD --target MODEL --chats HELDIN.jsonl.gz --output FILE.json

A dynamic tree takes softmax((log q + noise) / temperature) for the chance that a child is the
target's token (`--tree.confidence-temperature`, 0.5 at every depth). Chains are drafted; where all
tokens before a depth are the target's, the script asks which temperature gives the target's token
at that depth the highest likelihood. For each depth: the number of such places, the best
temperature, the mean negative log-likelihood with it and with 0.5, and how often the target's token
is the first child, or one of the first two or four.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _common import chat_prompts, parser, run, write
from rich.progress import track
from torch import Tensor

import eyas
from eyas.drafters import _grow

DEPTH = 7
TEMPERATURES = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0, 1.25, 1.6)
DEFAULT = TEMPERATURES.index(0.5)
LEAST = 20  # places; a depth with fewer is left out
FLOOR = -20.0  # the least log-likelihood of a token that counts: one surprise must not decide
Level = tuple[int, int, Tensor]  # position of the root, depth of the children, log q + noise [V]


@contextmanager
def watched() -> Iterator[list[Level]]:
    """Within this context, every drafted level of a chain is added to the list."""
    levels: list[Level] = []
    original = _grow._best_children

    def watching(
        growth: Any, cycle_input: Any, tree: Any, hidden: Tensor, adjustments: Any, so_far: Any, level: int
    ) -> Any:
        logits_BQV = growth.head(hidden)
        key_BQV = _grow._log_q(_grow.apply_sampling_rows(logits_BQV, cycle_input.sampling, adjustments))
        if not cycle_input.noise.all_greedy:
            key_BQV = key_BQV + growth.noise(cycle_input, level, logits_BQV.shape[-1])
        levels.append((int(cycle_input.position_B[0]), level + 1, key_BQV[0, 0].clone()))
        return original(growth, cycle_input, tree, hidden, adjustments, so_far, level)

    _grow._best_children = watching  # type: ignore[assignment]
    try:
        yield levels
    finally:
        _grow._best_children = original


def judged(levels: Sequence[Level], prompt: int, answer: Sequence[int]) -> Iterator[tuple[int, int, list[float]]]:
    """(depth, children better than the target's token, its log-likelihood with each temperature),
    where the chain is right before it."""
    right = True
    for root, depth, key_V in levels:
        place = root + depth - prompt  # of the predicted token in the answer
        right = (right or depth == 1) and place < len(answer)
        if right:
            token = answer[place]
            better = int((key_V > key_V[token]).sum())
            yield depth, better, [max(FLOOR, float((key_V / t).log_softmax(-1)[token])) for t in TEMPERATURES]
            right = better == 0


def row(depth: int, places: Sequence[tuple[int, list[float]]]) -> dict[str, float]:
    """The figures of one depth."""
    better_X = torch.tensor([better for better, _ in places])
    loss_T = -torch.tensor([likelihoods for _, likelihoods in places]).mean(0)
    best = int(loss_T.argmin())
    figures = {"depth": depth, "places": len(places), "best": TEMPERATURES[best]}
    figures |= {"loss": float(loss_T[best]), "loss_at_0.5": float(loss_T[DEFAULT])}
    return figures | {f"first_{k}": float((better_X < k).float().mean()) for k in (1, 2, 4)}


def main() -> None:
    defaults = {"target": None, "method": "eagle3", "limit": 100, "max_new_tokens": 96}
    args = parser(__doc__, chats=True, draft=(None, "else the embedded model's head"), **defaults).parse_args()
    chain = {"nodes": DEPTH + 1, "depth": DEPTH, "branch": 1}
    llm = eyas.load(args.target, args.draft, args.method, kernels="off", tree=chain)
    table: dict[str, list[dict[str, float]]] = {}
    for temperature in (0.0, 1.0):
        places = defaultdict[int, list[tuple[int, list[float]]]](list)
        for seed, prompt in enumerate(track(chat_prompts(args.chats, args.limit), f"T = {temperature:g}")):
            with watched() as levels:
                sampling = {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "seed": seed}
                result = llm.generate(list(prompt.messages), **sampling)
            for depth, better, likelihoods in judged(levels, len(llm.ids(list(prompt.messages))), result.token_ids):
                places[depth].append((better, likelihoods))
        rows = [row(depth, tokens) for depth, tokens in sorted(places.items()) if len(tokens) >= LEAST]
        table[f"T = {temperature:g}"] = [{name: round(value, 4) for name, value in one.items()} for one in rows]
    write(args.output, {"method": args.method, "table": table})


if __name__ == "__main__":
    run(main)
