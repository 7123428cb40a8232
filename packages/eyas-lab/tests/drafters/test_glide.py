"""glide: the layer sees the target's keys of the committed tokens, in a tree as in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import zoo
from eyas import checkpoints
from eyas.core.cache import additive_mask
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch
from eyas.errors import CheckpointError
from eyas.nn import Documents
from eyas_lab.methods.method_glide import Method, Options, Seen, WholeTexts
from reference import plain_decode, run

PROMPT = (3, 4, 5, 9, 8, 7, 1, 22, 14)


@pytest.fixture
def target() -> Target:
    return Target(zoo.tiny("llama"))


def make(target: Target, seed: int = 1, **tree: int) -> Method:
    return Method.random(target, build_options(Options, {"tree": tree} if tree else {}), seed)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_chain_is_the_layer_over_the_whole_text(family: str) -> None:
    """Guards slots, positions and which of the target's keys are seen: the draft's log q of each token of each chain
    against one pass over the whole text, with the keys of the committed tokens."""
    target = Target(zoo.FAMILIES[family]())
    drafter = make(target, nodes=4, depth=3, branch=1)
    tokens, steps = run(Decoder(target, drafter), [Request(PROMPT, 9)])
    committed, text = len(PROMPT), [*PROMPT, *tokens[0]]
    for step in steps:
        if step.draft is None:
            continue
        chain = step.draft.tokens_BN[0].tolist()
        assert chain[0] == text[committed]
        ids_1T, cache = torch.tensor([text[:committed] + chain]), DynamicCache()
        target.family.base(input_ids=ids_1T, past_key_values=cache, use_cache=True)
        slot_S = torch.arange(ids_1T.shape[1] - 1)
        mask_S = additive_mask(torch.arange(ids_1T.shape[1]) < committed, target.dtype)
        layer: Any = cache.layers[drafter.source_layer]
        seen = Seen(layer.keys, layer.values, mask_S.expand(1, 1, len(slot_S), -1))
        causal = WholeTexts((slot_S[:, None] >= slot_S)[None, None])
        with torch.no_grad():
            hidden_1SD = drafter.net(target.embed(ids_1T[:, 1:]), slot_S[None], causal, seen)
        log_q_3V = drafter.head(hidden_1SD)[0, -4:-1].log_softmax(-1)
        wanted = log_q_3V.gather(1, torch.tensor(chain[1:])[:, None])[:, 0]
        assert torch.allclose(step.draft.log_q_BN[0, 1:], wanted, atol=1e-4)
        committed += len(step.tokens)


@pytest.mark.slow
def test_training_helps(target: Target) -> None:
    """Guards the loss and its gradient: the layer learns one text of the target, and its drafts are accepted there."""
    answer = plain_decode(target.model, Request(PROMPT, 40))
    drafter, tokens_N = make(target, nodes=6, depth=5, branch=1), torch.tensor([*PROMPT, *answer])
    before, generator = tau(drafter), torch.Generator().manual_seed(0)
    features_NF = target.encode(tokens_N[None], (target.num_layers,))[0]
    twice = torch.cat([tokens_N[:20], tokens_N]), torch.cat([features_NF[:20], features_NF])
    batch = Batch(*twice, torch.ones(len(twice[0]), dtype=torch.bool), Documents((20, len(tokens_N))))
    optimiser = torch.optim.Adam(drafter.net.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss = drafter.loss(batch, generator)
        assert int(loss.count) == len(twice[0]) - 4
        (loss.total / loss.count).backward()
        optimiser.step()
    assert tau(drafter) > max(2.5, before)


def tau(drafter: Method) -> float:
    _, steps = run(Decoder(drafter.target, drafter), [Request(PROMPT, 40)])
    cycles = [step for step in steps if not step.prefill]
    return sum(len(step.tokens) for step in cycles) / len(cycles)


def test_a_layer_comes_back(tmp_path: Path, target: Target) -> None:
    """Guards the format, and the sizes of the target's keys."""
    drafter = make(target)
    checkpoints.save(drafter.weights(), tmp_path)
    again: Any = Method.from_pretrained(tmp_path, target)
    assert all(torch.equal(value, drafter.net.state_dict()[name]) for name, value in again.net.state_dict().items())
    weights = drafter.weights()
    with pytest.raises(CheckpointError, match="the head's vocabulary is 7"):
        Method.load(replace(weights, config={**weights.config, "vocab_size": 7}), target)
