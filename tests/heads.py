"""What the tests of methods with one head per token share."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zoo
from eyas.core.drafter import Batch, Drafter, build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import find
from eyas.nn import Documents
from eyas.train.alpha import chain_figures
from eyas.train.data import Batches, Example, Examples
from eyas.train.features import batch_of as packed
from eyas.train.loop import TrainConfig, train

LAWS = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=20, top_p=0.9, seed=4), Sampling(1.3, repetition_penalty=1.2, seed=5))


def tiny_target() -> Target:
    torch.set_num_threads(1)
    return Target(zoo.tiny("llama"), "tiny-llama")


def make(name: str, target: Target, kind: str = "random", **options: Any) -> Any:
    """A head of this method with these options; `kind`: random or fresh."""
    method = find(name)
    return getattr(method, kind)(target, build_options(method.Options, options), 1)


def language(count: int, seed: int) -> Examples:
    """Few tokens, each with two followers."""
    generator, found = torch.Generator().manual_seed(seed), Examples()
    for i in range(count):
        ids = [1]
        while len(ids) < 12 + i % 9:
            ids.append(3 + (ids[-1] * 5 + int(torch.randint(2, (), generator=generator))) % 40)
        found.append(Example(ids, [t >= 4 for t in range(len(ids))]))
    return found


def batch_of(target: Target, layer: int) -> Batch:
    """Three documents, one of them too short for anything; some tokens count, with gaps."""
    lengths, generator = (9, 2, 6), torch.Generator().manual_seed(0)
    tokens_N = torch.randint(target.vocab_size, (sum(lengths),), generator=generator)
    counted_N = torch.tensor([t % 5 != 3 for t in range(len(tokens_N))])
    features = [target.encode(part[None], (layer,))[0] for part in tokens_N.split(lengths)]
    return Batch(tokens_N, torch.cat(features), counted_N, Documents(lengths))


def places(batch: Batch, heads: int) -> list[tuple[int, int, int]]:
    """(head, token, what it foretells) of everything that counts, document by document, by a plain loop."""
    found, begin = [], 0
    for length in batch.documents.lengths:
        for k, t in itertools.product(range(heads), range(begin, begin + length)):
            goal = t + 2 + k
            if goal < begin + length and batch.counted_N[goal]:
                found.append((k, t, goal))
        begin += length
    return found


def answer(batch: Batch, target: Target, goal: int, objective: str) -> Tensor:
    """The law [V] that a head should say."""
    if objective == "tokens":
        return torch.nn.functional.one_hot(batch.tokens_N[goal], target.vocab_size).float()
    return target.head(batch.features_NF[goal - 1]).softmax(-1)


def short_training(drafter: Drafter, folder: Path) -> tuple[float, list[dict[str, float]], dict[str, float]]:
    """(held-out loss at the beginning, those of the evaluations, the figures of the end) of a few steps through the trainer."""
    heldout = language(12, 1)
    batches = Batches(heldout, 512)
    with torch.no_grad():
        first = drafter.loss(packed(batches, batches.plan(0)[0], drafter))
    config = TrainConfig(lr=3e-3, steps=40, batch_tokens=256, max_length=32, eval_every=10, save_every=20, precision="float32")
    evaluate = chain_figures(heldout, prompts=3, new_tokens=8, depth=3, tree_prompts=1)
    outcome = train(drafter, language(60, 0), heldout, config, folder, evaluate=evaluate)
    losses = json.loads((folder / "training.json").read_text())["losses"]
    return float(first.total) / int(first.count), losses, dict(outcome.heldout)
