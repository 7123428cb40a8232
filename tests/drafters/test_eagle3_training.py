"""The training-time test of eagle3: against the reference's numbers, against the definition, and its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas import checkpoints
from eyas.drafters._base import Batch
from eyas.drafters.eagle3 import Method, TrainingTimeTest
from eyas.nn import Documents
from eyas.target import Target

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"

PUBLISHED = {
    "fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.weight",
    "midlayer.hidden_norm.weight": "layer.hidden_norm.weight", "midlayer.input_layernorm.weight": "layer.embed_norm.weight",
    "midlayer.post_attention_layernorm.weight": "layer.mlp_norm.weight",
    **{f"midlayer.self_attn.{x}_proj.weight": f"layer.attention.{x}.weight" for x in "qkvo"},
    **{f"midlayer.mlp.{x}_proj.weight": f"layer.mlp.{x}.weight" for x in ("gate", "up", "down")},
}  # fmt: skip


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data of the reference is not beside this checkout")
def test_the_seven_losses_and_gradients_of_the_reference() -> None:
    """The reference's batch with its mask (position a of the ids, not of the predicted token), its unmasked last column (a target of zero
    logits) and its normaliser (all positions): seven losses to 1e-4, every gradient to 1e-4."""
    said = json.loads((GOLDEN / "train_losses.json").read_text())["eagle3"]
    tensors = load_file(GOLDEN / "train_losses.safetensors")
    target = Target.load(GOLDEN / "target_b", dtype="float32", device="cpu")
    drafter = Method.load(checkpoints.load(GOLDEN / "head_eagle3_b"), target)
    ids, mask, T, extra, steps = tensors["eagle3.input_ids"], tensors["eagle3.loss_mask"].bool(), 24, 9, 7
    # behind each row stand tokens 0 with features 0: what the reference shifts in
    tokens = torch.nn.functional.pad(ids, (0, extra))
    with torch.no_grad(), target.tap(drafter.studies) as seen:  # its padding is masked: what the target says there is used, once
        target.model(input_ids=ids, attention_mask=tensors["eagle3.attention_mask"])
        features = torch.nn.functional.pad(seen(), (0, 0, 0, extra))
    documents = Documents((T + extra,) * 2)
    batch = Batch(tokens.flatten(), features.flatten(0, 1), torch.ones(2 * (T + extra), dtype=torch.bool), documents)
    rows_M = torch.cat([torch.arange(T), torch.arange(T) + T + extra])
    guesses = [(i, r * T + t, r * T + t + i) for i in range(steps) for r in range(2) for t in range(T - i) if mask[r, t + i]]
    step_K, row_K, answer_K = torch.tensor(guesses).T
    before_U = torch.cat([torch.arange(T) + 1, torch.arange(T) + 1 + T + extra])
    with torch.enable_grad():
        found, _ = drafter.rehearsal(batch, rows_M, step_K, row_K, answer_K, before_U, TrainingTimeTest(steps, 0.8))
        (found.total / (2 * T)).backward()
    for i, expected in enumerate(said["plosses"]):
        assert float(found.each_K[step_K == i].sum() / (2 * T)) == pytest.approx(expected, abs=1e-4)
    assert float(found.total.detach() / (2 * T)) == pytest.approx(said["loss"], abs=1e-4)
    parameters = dict(drafter.net.named_parameters())
    assert set(PUBLISHED.values()) == set(parameters)
    for theirs, ours in PUBLISHED.items():
        expected = tensors[f"eagle3.grad.{theirs}"]
        torch.testing.assert_close(parameters[ours].grad, expected, atol=1e-4, rtol=1e-4, msg=lambda text, ours=ours: f"{ours}: {text}")
