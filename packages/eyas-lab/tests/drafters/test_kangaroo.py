"""kangaroo: the target's own first layers and an adapter, which is trained, saved and loaded without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from eyas import checkpoints
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.errors import CheckpointError, OptionError
from eyas_lab.methods.method_kangaroo import Method, Options
from reference import run

IDS = torch.tensor([[3, 4, 5, 9, 8, 7, 1]])


@pytest.fixture
def target() -> Target:
    return Target(zoo.tiny("llama"))


def make(target: Target, **options: Any) -> Method:
    return Method.init_for_training(target, build_options(Options, options))


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_the_draft_is_the_early_exit_with_an_attention(exit_layer: int, target: Target) -> None:
    """Guards the view: hidden states of the target's own layers, the attention of the next one, then norm and head."""
    drafter, attended = make(target, **{"head.exit": exit_layer}), list[Tensor]()
    layer = target.family.layers[exit_layer]
    hook = layer.self_attn.register_forward_hook(lambda module, args, output: attended.append(output[0]))
    hidden = target.model(IDS, output_hidden_states=True).hidden_states[exit_layer]
    hook.remove()
    wanted = target.model.lm_head(target.model.model.norm(hidden + attended[0]))
    assert torch.allclose(drafter.draft_model.model(IDS).logits, wanted, atol=1e-5)
    own = {id(weight) for weight in drafter.net.parameters()}
    assert not own & {id(weight) for weight in target.model.parameters()}
    assert {id(weight) for weight in drafter.draft_model.model.parameters()} - own < {
        id(weight) for weight in target.model.parameters()
    }


def test_drafting_stops_after_an_uncertain_token(target: Target) -> None:
    """Guards the second exit: nothing is drafted after a token of less confidence than the threshold."""
    drafter = make(target, confidence=0.15, depth=6)
    _, steps = run(Decoder(target, drafter), [Request(tuple(IDS[0].tolist()), 20)])
    lengths = list[int]()
    for step in steps:
        if step.draft is None:
            continue
        confident_N, drafted_N = step.draft.log_q_BN[0].exp() >= 0.15, step.draft.tree.acceptable_BN[0]
        stop = next((n for n in range(1, 7) if not confident_N[n]), 6)
        assert drafted_N.tolist() == [n <= stop for n in range(7)]
        lengths.append(stop)
    assert len(set(lengths)) > 1


def test_an_adapter_comes_back(tmp_path: Path, target: Target) -> None:
    """Guards the format, and the exit that it names; the target's layers are not in the file."""
    drafter = Method.random(target, build_options(Options, {"head.exit": 2}), seed=3)
    weights = drafter.weights()
    assert all(name.startswith(("self_attn.", "input_layernorm.", "post_attention_")) for name in weights.tensors)
    checkpoints.save(weights, tmp_path)
    again: Any = Method.from_pretrained(tmp_path, target)
    assert again.exit == 2
    assert torch.equal(again.draft_model.model(IDS).logits, drafter.draft_model.model(IDS).logits)
    with pytest.raises(CheckpointError, match=r"head\.exit must be from 1 to"):
        Method.load(replace(weights, config={**weights.config, "exit": 9}), target)
    with pytest.raises(CheckpointError, match="needs a trained head"):
        Method.from_pretrained(None, target)
    with pytest.raises(OptionError, match=r"head\.exit must be a whole number"):
        make(target, **{"head.exit": 0})
