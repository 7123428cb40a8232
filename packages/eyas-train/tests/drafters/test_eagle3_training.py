"""The training-time test of eagle3: against the reference's numbers, against the definition, and its memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas import checkpoints
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch
from eyas.drafters.eagle3 import Method, TrainingTimeTest
from eyas.errors import FitError, OptionError
from eyas.nn import Documents
from eyas.targets.loading import load_target
from eyas_train.data import Example
from eyas_train.loop import TrainConfig, train
from eyas_train.method_losses import ttt_losses
from eyas_train.own_outputs import Predictions, training_time_test
from golden import GOLDEN, needs_golden
from reference import plain_decode, run

PUBLISHED = {
    "fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.weight",
    "midlayer.hidden_norm.weight": "layer.hidden_norm.weight", "midlayer.input_layernorm.weight": "layer.embed_norm.weight",
    "midlayer.post_attention_layernorm.weight": "layer.mlp_norm.weight",
    **{f"midlayer.self_attn.{x}_proj.weight": f"layer.attention.{x}.weight" for x in "qkvo"},
    **{f"midlayer.mlp.{x}_proj.weight": f"layer.mlp.{x}.weight" for x in ("gate", "up", "down")},
}  # fmt: skip


@needs_golden
def test_the_seven_losses_and_gradients_of_the_reference() -> None:
    """The reference's batch with its mask (position a of the ids, not of the predicted token), its unmasked last column
    (a target of zero logits) and its normaliser (all positions): seven losses to 1e-4, every gradient to 1e-4."""
    said = json.loads((GOLDEN / "train_losses.json").read_text())["eagle3"]
    tensors = load_file(GOLDEN / "train_losses.safetensors")
    target = load_target(GOLDEN / "target_b", dtype="float32", device="cpu")
    drafter = Method.load(checkpoints.load(GOLDEN / "head_eagle3_b"), target)
    ids, mask, T, extra, steps = tensors["eagle3.input_ids"], tensors["eagle3.loss_mask"].bool(), 24, 9, 7
    # behind each row stand tokens 0 with features 0: what the reference shifts in
    tokens = torch.nn.functional.pad(ids, (0, extra))
    with (
        torch.no_grad(),
        target.tap(drafter.train_feature_layers) as seen,
    ):  # its padding is masked: what the target says there is used, once
        target.model(input_ids=ids, attention_mask=tensors["eagle3.attention_mask"])
        features = torch.nn.functional.pad(seen(), (0, 0, 0, extra))
    documents = Documents((T + extra,) * 2)
    batch = Batch(tokens.flatten(), features.flatten(0, 1), torch.ones(2 * (T + extra), dtype=torch.bool), documents)
    rows_M = torch.cat([torch.arange(T), torch.arange(T) + T + extra])
    places = [(i, r, t) for i in range(steps) for r in range(2) for t in range(T - i) if mask[r, t + i]]
    guesses = [(i, r * T + t, r * T + t + i) for i, r, t in places]
    step_K, row_K, position_K = torch.tensor(guesses).T
    before_U = torch.cat([torch.arange(T) + 1, torch.arange(T) + 1 + T + extra])
    with torch.enable_grad():
        predictions = Predictions(rows_M, step_K, row_K, position_K, before_U)
        found, _ = ttt_losses(drafter, batch, predictions, TrainingTimeTest(steps, 0.8))
        (found.total / (2 * T)).backward()
    for i, expected in enumerate(said["plosses"]):
        assert float(found.loss_K[step_K == i].sum() / (2 * T)) == pytest.approx(expected, abs=1e-4)
    assert float(found.total.detach() / (2 * T)) == pytest.approx(said["loss"], abs=1e-4)
    parameters = dict(drafter.net.named_parameters())
    assert set(PUBLISHED.values()) == set(parameters)
    for theirs, ours in PUBLISHED.items():
        expected = tensors[f"eagle3.grad.{theirs}"]
        said = lambda text, ours=ours: f"{ours}: {text}"  # noqa: E731
        torch.testing.assert_close(parameters[ours].grad, expected, atol=1e-4, rtol=1e-4, msg=said)


VARIANTS = {
    "plain": {},
    "eagle-3.1": {"head.fc_norm": True, "head.norm_output": True},
    "three layers": {"head.depth": 3},
}


@pytest.mark.quick("1-eagle-3.1")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cycles", [1, 4])
def test_training_rehearses_what_a_chain_does(variant: str, cycles: int, target: Target) -> None:
    """Guards pairing, positions, feature layers and what is handed on, after several cycles: step i
    of the training-time test, at the newest slot and given the drafted tokens, has the hidden state
    that the chain had at depth i."""
    options = {**VARIANTS[variant], "tree.nodes": 6, "tree.depth": 5, "tree.branch": 1, "head.layers": "0,1,3"}
    drafter = Method.random(target, build_options(Method.Options, options), seed=3)
    outputs: list[torch.Tensor] = []
    drafter.net.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    decoder, tokens = Decoder(target, drafter), list(range(3, 20))
    decoder.add(Request(tuple(tokens), 30))
    for _ in range(cycles):
        outputs.clear()
        prefix = list(tokens)  # what is committed when the cycle begins, its newest token included
        steps = decoder.step()
        for step in steps:
            tokens += step.tokens
            prefix += step.tokens if step.prefill else ()
    drafted = steps[-1].draft.tokens_BN[0].tolist()
    ids = torch.tensor([*prefix, *drafted[1:]])
    with torch.no_grad():
        features = target.encode(ids[None], drafter.feature_layers)[0]
        row = torch.tensor([len(prefix) - 2])  # the pair (feature before the root, root)
        hidden = training_time_test(
            drafter.net,
            features, lambda index: drafter.embed(ids[index]), row, Documents((len(ids),)), 5
        )  # fmt: skip
    assert len(outputs) == 5
    assert len(steps[-1].path) == 1, "a random head accepts nothing, so one pair is read"
    torch.testing.assert_close(outputs[0][0], hidden[0][0], atol=1e-5, rtol=1e-4)
    for level in range(1, 5):
        torch.testing.assert_close(outputs[level][0], hidden[level][0], atol=1e-5, rtol=1e-4)


def test_only_rows_that_count_are_worked_out(target: Target) -> None:
    """Guards the choice of rows, marks and documents: the loss of a packed batch is that of its
    documents apart, and what stands before, between and behind the counted tokens changes only
    keys. Against the sum over every slot and step, one document at a time."""
    options = build_options(Method.Options, {"ttt.steps": 3, "head.layers": "0,1,3", "ttt.feature": 0.5})
    drafter = Method.random(target, options, seed=3, draft_ids_v=torch.arange(0, target.vocab_size, 2))
    generator = torch.Generator().manual_seed(0)
    lengths, ids = (9, 4, 14), torch.randint(target.vocab_size, (27,), generator=generator)
    counted = torch.rand(27, generator=generator) < 0.5
    counted[torch.tensor([0, 1, 9, 10, 13, 14])] = False  # nothing foresees the first two of a document
    features = torch.cat([target.encode(part[None], drafter.train_feature_layers)[0] for part in ids.split(lengths)])
    whole = drafter.loss(Batch(ids, features, counted, Documents(lengths)))
    total, count, right, overlap = 0.0, 0, 0, [0.0, 0.0, 0.0]
    for part, feature, mark in zip(ids.split(lengths), features.split(lengths), counted.split(lengths), strict=True):
        n = len(part)
        with torch.no_grad():
            every = training_time_test(
            drafter.net,
                feature[:, : 3 * target.hidden_size], lambda index, part=part: drafter.embed(part[index]), torch.arange(n),
                Documents((n,)), 3,
            )  # fmt: skip
            final = feature[:, 3 * target.hidden_size :]
            true = target.head(final)
        for i in range(3):
            for t in range(n - 2 - i):
                u = t + 2 + i
                best = int(true[u - 1].argmax())
                if not mark[u] or best % 2:
                    continue
                normed = drafter.net.head_input(every[i][t]).detach()
                log_q, p = drafter.net.head(normed).detach().log_softmax(-1), true[u - 1, ::2].softmax(-1)
                near = torch.nn.functional.smooth_l1_loss(normed, final[u - 1])
                total += 0.8**i * float(-(p * log_q).sum() + 0.5 * near)
                count += i == 0
                right += i == 0 and int(log_q.argmax()) * 2 == best
                overlap[i] += float(torch.minimum(true[u - 1].softmax(-1)[::2], log_q.exp()).sum())
    assert float(whole.total.detach()) == pytest.approx(total, rel=1e-4)
    assert int(whole.count) == count > 0
    assert int(whole.sums["accuracy"]) == right
    found = [float(whole.sums[name]) for name in ("overlap", "overlap at step 3")]
    assert found == pytest.approx([overlap[0], overlap[2]], rel=1e-4)


def test_a_head_with_its_own_embedding_and_width(target: Target) -> None:
    """Guards heads narrower than their target, which bring their own embedding: they load, draft
    losslessly and can be trained."""
    tree = {"tree.nodes": 6, "tree.depth": 3, "tree.branch": 2}
    options = build_options(Method.Options, {**tree, "ttt.steps": 2, "head.layers": "0,1,3"})
    wide = Method.random(target, options, seed=3, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16)
    weights = wide.weights()
    weights.tensors["embed.weight"] = torch.randn(target.vocab_size, 32)
    drafter = Method.load(weights, target, options)
    decoder = Decoder(target, drafter)
    request = Request(tuple(range(3, 20)), 8)
    assert run(decoder, [request])[0] == [plain_decode(target.model, request)]
    ids = torch.arange(3, 15)
    features = target.encode(ids[None], drafter.train_feature_layers)[0]
    batch = Batch(ids, features, torch.arange(12) > 3, Documents((12,)))
    assert drafter.loss(batch).total.isfinite()


def test_layers_must_rise(target: Target) -> None:
    """A head saved with layers in another order could not be read again: fc's columns follow them."""
    with pytest.raises(OptionError, match=r"head\.layers must be rising numbers from 0 to 3"):
        Method.random(target, build_options(Method.Options, {"head.layers": "3,1,0"}))


def test_a_published_head_that_names_no_layers(target: Target, tmp_path: Path) -> None:
    """--head.layers is for new heads: for a published one on a target of few layers the way out
    that is said must work."""
    drafter = Method.random(target, build_options(Method.Options, {"head.layers": "0,2,3"}), seed=5)
    checkpoints.save(drafter.weights(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {name: config["eyas"].pop(name) for name in ("feature_layers", "layer_ids")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "this target has 4. If the layers of its training are known, write them into its config"
    with pytest.raises(FitError, match=said) as told:
        Method.load(checkpoints.load(tmp_path), target)
    assert "--head.layers" not in str(told.value)
    (said,) = re.findall(r'"eyas": (\{.*\})$', str(told.value))
    assert json.loads(said) == named
    (tmp_path / "config.json").write_text(json.dumps({**config, "eyas": {**config["eyas"], **json.loads(said)}}))
    assert Method.load(checkpoints.load(tmp_path), target).feature_layers == (0, 2, 3)


def test_a_head_without_a_head_of_its_own_is_refused_before_the_first_step(target: Target, tmp_path: Path) -> None:
    """It speaks through the target's lm_head: its loss would have nothing to train. Said before a
    state or a log is begun."""
    drafter = Method.random(target, build_options(Method.Options, {"head.layers": "0,1,3"}))
    drafter.net.head = None
    with pytest.raises(OptionError, match="uses the target's lm_head and cannot be trained"):
        train(drafter, [Example([1, 2, 3, 4], [True] * 4)], [], TrainConfig(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_nothing_that_counts(target: Target) -> None:
    """Documents of one and two tokens, of which nothing is foreseen."""
    drafter = Method.random(target, build_options(Method.Options, {"head.layers": "0,1,3"}))
    ids = torch.tensor([5, 6, 7])
    features = target.encode(ids[None], drafter.train_feature_layers)[0]
    batch = Batch(ids, features, torch.zeros(3, dtype=torch.bool), Documents((1, 2)))
    loss = drafter.loss(batch)
    assert (float(loss.total.detach()), int(loss.count)) == (0.0, 0)
