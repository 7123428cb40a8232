"""distillspec: texts of the small model's own, with the target's features on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch, small_model
from eyas.errors import OptionError
from eyas.nn import Documents
from eyas_lab.methods.method_distillspec import Method, Options

LENGTHS = (9, 4, 6)


@pytest.fixture
def target() -> Target:
    return Target(zoo.tiny("llama"))


def make(target: Target, **options: Any) -> Method:
    return Method.random(target, build_options(Options, options), seed=1)


def batch(target: Target) -> Batch:
    tokens_N = torch.randint(100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    features = [target.encode(ids[None], (target.num_layers,))[0] for ids in tokens_N.split(LENGTHS)]
    counted_N = torch.cat([torch.arange(length) >= 2 for length in LENGTHS])
    return Batch(tokens_N, torch.cat(features), counted_N, Documents(LENGTHS))


def test_answers_are_the_small_models(target: Target) -> None:
    """Guards padding on both sides: prompts stay, answers are likely under the small model, features are the target's.
    Odds of a false alarm: the seed is fixed."""
    drafter, given = make(target), batch(target)
    with torch.no_grad():
        for weight in drafter.net.parameters():
            weight.mul_(4)  # a model that is sure of its tokens
    torch.manual_seed(0)
    own = drafter.with_own_answers(given)
    surprise, before = list[float](), 0
    for ids, features, old in zip(
        *(x.split(LENGTHS) for x in (own.tokens_N, own.features_NF, given.tokens_N)), strict=True
    ):
        assert ids[:2].tolist() == old[:2].tolist()
        before += int((ids[2:] == old[2:]).sum())
        assert torch.allclose(features, target.encode(ids[None], (target.num_layers,))[0], atol=1e-5)
        log_q_TV = drafter.draft_model.model(ids[None]).logits[0].log_softmax(-1).detach()
        surprise += (-log_q_TV[1:-1].gather(1, ids[2:, None])).flatten().tolist()
    assert before < 3
    assert sum(surprise) / len(surprise) < 3  # of tokens that are drawn evenly: above 4.5
    assert own.documents is given.documents


def test_which_batches_have_own_answers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards evaluation, which reads the given text, and the share in training."""
    drafter, given, changed = make(target, own=0.5), batch(target), list[int]()
    monkeypatch.setattr(drafter, "with_own_answers", lambda batch: (changed.append(1), batch)[1])
    generator = torch.Generator().manual_seed(0)
    plain = small_model.Method.loss(drafter, given)
    assert torch.equal(drafter.loss(given, generator).total, plain.total)
    assert not changed
    drafter.net.train()
    for _ in range(20):
        drafter.loss(given, generator)
    assert 4 < len(changed) < 16
    with pytest.raises(OptionError, match="own must be from 0 to 1"):
        make(target, own=2)
