"""For tests of the methods that predict by heads: EAGLE-1, Medusa, Hydra."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from eyas.core.drafter import CycleInput, Drafter
from eyas.core.engine import Request
from eyas.core.options import build_options
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.drafters import Batch, find
from eyas.nn import Documents
from eyas_train.alpha import chain_figures
from eyas_train.data import Batches, Example, Examples
from eyas_train.features import batch_of as packed
from eyas_train.loop import TrainConfig, train
from reference import SAMPLINGS, plain_decode


def tiny_target() -> Target:
    torch.set_num_threads(1)
    return Target(zoo.tiny("llama"), "tiny-llama")


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of tests/zoo.py."""
    return tiny_target()


@pytest.fixture(scope="module")
def answered(target: Target) -> list[tuple[Request, list[int]]]:
    """Requests of different lengths and samplings, each with the tokens that a plain loop gives."""
    requests = [Request(tuple(range(7, 7 + n)), 14, SAMPLINGS[i % 4]) for i, n in enumerate((5, 23, 1, 12, 9, 17))]
    return [(r, plain_decode(target.model, r)) for r in requests]


def make(name: str, target: Target, kind: str = "random", **options: Any) -> Any:
    """A head of this method with these options; `kind`: random or fresh."""
    method = find(name)
    return getattr(method, kind)(target, build_options(method.Options, options), 1)


def roots_of(rows: int, sampling: Sampling = Sampling()) -> CycleInput:  # noqa: B008 - frozen
    """The input of a cycle whose rows have different roots and positions."""
    samplings, position_B = (sampling,) * rows, torch.arange(rows) + 5
    everywhere, noise = torch.ones(rows, dtype=torch.bool), GumbelNoise.from_sampling(samplings)
    return CycleInput(torch.arange(rows) + 3, position_B, everywhere, samplings, noise, int(position_B.max()))


def features(target: Target, rows: int) -> Tensor:
    """The target's final features [rows, D] after six tokens, others in each row."""
    return target.encode(torch.arange(rows * 6).view(rows, 6) + 2, (target.num_layers,))[:, -1]


def language(count: int, seed: int) -> Examples:
    """Examples in a language of few tokens, each of which has two successors."""
    generator, examples = torch.Generator().manual_seed(seed), Examples()
    for i in range(count):
        ids = [1]
        while len(ids) < 12 + i % 9:
            ids.append(3 + (ids[-1] * 5 + int(torch.randint(2, (), generator=generator))) % 40)
        examples.append(Example(ids, [t >= 4 for t in range(len(ids))]))
    return examples


def batch_of(target: Target, layer: int) -> Batch:
    """Three documents, one of them too short for anything; some tokens count, with gaps."""
    lengths, generator = (9, 2, 6), torch.Generator().manual_seed(0)
    tokens_N = torch.randint(target.vocab_size, (sum(lengths),), generator=generator)
    counted_N = torch.tensor([t % 5 != 3 for t in range(len(tokens_N))])
    features = [target.encode(part[None], (layer,))[0] for part in tokens_N.split(lengths)]
    return Batch(tokens_N, torch.cat(features), counted_N, Documents(lengths))


def predictions(batch: Batch, heads: int) -> list[tuple[int, int, int]]:
    """(head, position, predicted position) of everything that counts, document by document, by a plain loop."""
    counted, begin = [], 0
    for length in batch.documents.lengths:
        for k, t in itertools.product(range(heads), range(begin, begin + length)):
            goal = t + 2 + k
            if goal < begin + length and batch.counted_N[goal]:
                counted.append((k, t, goal))
        begin += length
    return counted


def training_target(batch: Batch, target: Target, goal: int, objective: str) -> Tensor:
    """The distribution [V] that a head is trained to predict."""
    if objective == "tokens":
        return torch.nn.functional.one_hot(batch.tokens_N[goal], target.vocab_size).float()
    return target.head(batch.features_NF[goal - 1]).softmax(-1)


def short_training(
    drafter: Drafter, folder: Path, steps: int = 40
) -> tuple[float, list[dict[str, float]], dict[str, float]]:
    """Train for a few steps; returns the held-out loss before, the losses of the evaluations, and the final figures."""
    heldout = language(12, 1)
    batches = Batches(heldout, 512)
    with torch.no_grad():
        first = drafter.loss(packed(batches, batches.plan(0)[0], drafter))
    config = TrainConfig(
        lr=3e-3, steps=steps, batch_tokens=256, max_length=32, eval_every=steps // 4, save_every=20, precision="float32"
    )
    evaluate = chain_figures(heldout, prompts=3, new_tokens=8, depth=3, tree_prompts=1)
    outcome = train(drafter, language(60, 0), heldout, config, folder, evaluate=evaluate)
    losses = json.loads((folder / "training.json").read_text())["losses"]
    return float(first.total) / int(first.count), losses, dict(outcome.heldout)
