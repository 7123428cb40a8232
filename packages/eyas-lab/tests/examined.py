"""Targets with kept answers and good heads for them: the embedded model with its heads, and a small random model with
heads that are trained on its very answers, so that a few steps make them good."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from eyas import checkpoints, drafters, tiny
from eyas.api import load
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import ModelRunner, Target
from eyas_lab.bench import tasks
from eyas_lab.examine.acceptance import DEPTH, KeptAnswer, keep, which_are_right
from eyas_lab.examine.verdict import Figures
from eyas_train.data import Example
from eyas_train.loop import TrainConfig, train

SHORT = 60  # tokens of a prompt
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"head.layers": "0,1,2", "head.draft_vocab": 120, "head.fc_norm": True, "head.norm_output": True},
    "dflash": {"head.layers": "1,2,3", "head.depth": 2, "head.block": 6},
    "dspark": {"head.layers": "1,3", "head.depth": 1, "head.block": 5, "head.markov_rank": 16},
}


@dataclass(frozen=True)
class World:
    """A target, its greedy answers, and folders of good heads by method."""

    target: Target
    answers: list[KeptAnswer]
    heads: dict[str, Path]

    def figures(self, head: str) -> Figures:
        """The acceptance of the good head."""
        weights = checkpoints.load(self.heads[head])
        drafter = drafters.find(weights.method).load(weights, self.target)
        return Figures.of([which_are_right(drafter, answer, DEPTH) for answer in self.answers])


@pytest.fixture(scope="session")
def embedded() -> World:
    llm = load(method="vanilla")
    target = llm.target.run_with(ModelRunner())
    prompts = [llm.ids(prompt.turns[0]) for prompt in tasks.load("bundled")]
    short = [prompt for prompt in prompts if len(prompt) <= SHORT][:10]
    answers = [keep(target, prompt, llm.generate(prompt, max_new_tokens=40).token_ids) for prompt in short]
    return World(target, answers, dict(tiny.HEADS))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    target, generator = Target(zoo.tiny("llama"), "small"), torch.Generator().manual_seed(0)
    prompts = torch.randint(3, target.vocab_size, (16, 12), generator=generator).tolist()
    decoder = Decoder(target, drafters.find("vanilla").load(None, target), rows=16)
    ids = [decoder.add(Request(tuple(prompt), 36)) for prompt in prompts]
    texts = dict[int, list[int]]()
    while not decoder.finished:
        for step in decoder.step():
            texts.setdefault(step.request_id, []).extend(step.tokens)
    answers = [keep(target, prompt, texts[number]) for prompt, number in zip(prompts, ids, strict=True)]
    examples = [Example(a.ids_N.tolist(), [t >= a.first for t in range(len(a.ids_N))]) for a in answers]
    config = TrainConfig(
        lr=5e-3, steps=90, batch_tokens=800, max_length=64, precision="float32", eval_every=0, save_every=0
    )
    heads = dict[str, Path]()
    for name, options in OPTIONS.items():
        method, heads[name] = drafters.find(name), tmp_path_factory.mktemp(name)
        counts_V = torch.bincount(torch.cat([a.ids_N for a in answers]), minlength=target.vocab_size)
        head = method.init_for_training(target, build_options(method.Options, options), 1, counts_V)
        train(head, examples, [], config, heads[name])
    return World(target, answers, heads)
