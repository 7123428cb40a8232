"""Hydra's heads: that they see the tokens of their own path, Hydra++'s layer, how they are trained."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads
import zoo
from eyas import checkpoints
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import CheckpointError, OptionError
from eyas.targets.fingerprints import has_fingerprint
from eyas_lab.methods.method_hydra import Method
from eyas_lab.methods.method_medusa import REFERENCE_TREE
from eyas_train.features import layers_for_training
from heads import features, make, roots_of
from reference import SAMPLINGS, plain_decode, run

PLUS = {"head.arch": "prefix-mlp", "head.blocks": 2}


SHAPES: list[dict[str, Any]] = [
    {"tree.choices": "reference"},
    {"tree.choices": "reference", "tree.noise": "none", "head.blocks": 2},
    {"tree.choices": "chain", "head.count": 2},
    {"tree.choices": "dynamic", "tree.nodes": 12},
    {"tree.choices": "reference", **PLUS},
    {"tree.choices": "dynamic", "tree.nodes": 12, "window.size": 7, "window.sink": 2, **PLUS},
]


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "init_for_training"])
def test_same_text_as_plain_decoding(
    target: Target, answered: list[tuple[Request, list[int]]], options: dict[str, Any], kind: str
) -> None:
    """Guards losslessness with useless and with half-right heads, at every temperature, rows
    joining and leaving, with penalties."""
    tokens, steps = run(Decoder(target, make("hydra", target, kind, **options), 3), [r for r, _ in answered])
    assert tokens == [expected for _, expected in answered]
    if kind == "init_for_training" and options["tree.choices"] == "reference":
        assert sum(s.accepted for s in steps) > 0, (
            "a fresh head repeats the last law, which must come true now and then"
        )


def test_a_fresh_head_is_the_targets_own(target: Target) -> None:
    """Guards the beginning of training: every head says what the target's head makes of the
    feature, exactly, whatever the path."""
    drafter, feature_BD = make("hydra", target, "init_for_training", **{"head.blocks": 3}), features(target, 2)
    for k in range(4):
        read = torch.cat(
            [feature_BD, torch.randn(2, (k + 1) * target.hidden_size, generator=torch.Generator().manual_seed(k))],
            dim=-1,
        )
        torch.testing.assert_close(drafter.head(read), target.head(feature_BD))


def test_a_fresh_prefix_layer_hands_the_feature_on(target: Target) -> None:
    """Guards the norm of a new Hydra++ layer: what the first head says is close to the target's
    law, not a scaled version of it."""
    drafter, feature_BD = make("hydra", target, "init_for_training", **PLUS), features(target, 4)
    handed_BD = drafter.net.packed(feature_BD, torch.arange(4), heads.Documents((1, 1, 1, 1))).detach()
    assert torch.nn.functional.cosine_similarity(handed_BD, feature_BD).min() > 0.999
    assert 0.7 < float(handed_BD.norm() / feature_BD.norm()) < 1.4


@pytest.mark.quick("sampling0")
@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_children_depend_on_their_path(target: Target, sampling: Sampling) -> None:
    """Guards inputs and their order: each node's children are the best of its head over [feature,
    root, path], one node at a time."""
    drafter, roots, feature_BD = make("hydra", target), roots_of(2, sampling), features(target, 2)
    draft = drafter.grow_below(feature_BD, roots)
    assert draft.q_BNV is None
    number = {(): 0} | {path: n for n, path in enumerate(REFERENCE_TREE, start=1)}
    for b, path in itertools.product(range(2), REFERENCE_TREE):
        above = [int(draft.tokens_BN[b, number[path[:i]]]) for i in range(len(path))]
        read_W = torch.cat([feature_BD[b], target.embed(torch.tensor(above)).flatten()])
        logq_V = drafter.head(read_W).log_softmax(-1)
        key_V = logq_V + roots.noise.gumbel(roots.position_B[:, None] + len(path), target.vocab_size)[b, 0]
        token = int(draft.tokens_BN[b, number[path]])
        assert token == key_V.argsort(descending=True)[path[-1]]
        torch.testing.assert_close(draft.log_q_BN[b, number[path]], logq_V[token])
    second = {int(draft.tokens_BN[0, number[(rank, 0)]]) for rank in range(10)}
    assert len(second) > 1 or not sampling.greedy, (
        "the best second token should differ from path to path, or this test proves little"
    )


def test_dynamic_and_fixed_trees_agree(target: Target) -> None:
    """Guards `longer` in both ways of growing: along the best path they draft the same tokens."""
    feature_BD = features(target, 2)
    chain = make("hydra", target, **{"tree.choices": "chain"}).grow_below(feature_BD, roots_of(2))
    grown = make("hydra", target, **{"tree.choices": "dynamic", "tree.nodes": 400}).grow_below(feature_BD, roots_of(2))
    for b in range(2):
        parents, tokens, node = grown.tree.parents_BN[b].tolist(), grown.tokens_BN[b].tolist(), 0
        for token in chain.tokens_BN[b, 1:].tolist():
            node = next(n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == token)


def test_siblings_differ_where_all_logits_are_equal(target: Target) -> None:
    """Guards against twins: a head that finds every token equally good still names different ones."""
    drafter = make("hydra", target)
    with torch.no_grad():
        for weight in drafter.net.parameters():
            weight.zero_()
    for sampling in SAMPLINGS[:3]:
        draft = drafter.grow_below(features(target, 1), roots_of(1, sampling))
        siblings = list(zip(draft.tree.parents_BN[0, 1:].tolist(), draft.tokens_BN[0, 1:].tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{}, PLUS])
def test_what_the_heads_read_while_decoding(target: Target, options: dict[str, Any]) -> None:
    """Guards commits and Hydra++'s cache: in every cycle it is what training reads there, over all
    true features so far."""
    drafter, seen = make("hydra", target, "init_for_training", **options), list[tuple[int, Tensor]]()
    below = drafter.grow_below
    if options:  # a layer that does something
        drafter.net.prefix.load_state_dict(make("hydra", target, **options).net.prefix.state_dict())

    def spy(feature_BD: Tensor, roots: CycleInput) -> Any:
        seen.append((int(roots.position_B[0]), feature_BD[0].clone()))
        return below(feature_BD, roots)

    drafter.grow_below = spy
    prompt = tuple(range(5, 25))
    ((tokens,), steps) = run(Decoder(target, drafter, 1), [Request(prompt, 16)])
    ids = torch.tensor([[*prompt, *tokens]])
    whole_TD = target.encode(ids, (target.num_layers,))[0]
    every = torch.arange(ids.shape[1])
    expected_TD = drafter.net.packed(whole_TD, every, heads.Documents((len(every),)))
    assert len(seen) > 3
    assert options or sum(s.accepted for s in steps) > 0
    for position, feature_D in seen:
        torch.testing.assert_close(feature_D, expected_TD[position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window.size": 8}, "leave --window"),
        ({"head.arch": "cross-attn"}, "head.arch"),
        ({"head.count": 0}, "head.count"),
        ({"objective": "words"}, "objective"),
        ({"tree.choices": "chain-5"}, "5 deep, and one level needs one head: this draft has 4"),
    ],
)
def test_impossible_options(target: Target, options: dict[str, Any], said: str) -> None:
    """Guards against options that would be ignored or misread."""
    with pytest.raises(OptionError, match=said):
        make("hydra", target, **options)


# --- weights ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{"head.blocks": 3}, PLUS])
def test_saved_and_loaded(target: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    """Guards `weights` and `load` through the published format: the same drafts, bit by bit, and
    the target's fingerprint."""
    drafter = make("hydra", target, **options)
    checkpoints.save(drafter.weights(), tmp_path)
    weights = checkpoints.load(tmp_path)
    again = Method.load(weights, target)
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in drafter.net.state_dict().items())
    request = Request(tuple(range(5, 16)), 10)
    drafts = [
        [s.draft.tokens_BN.tolist() for s in run(Decoder(target, d), [request])[1] if s.draft] for d in (drafter, again)
    ]
    assert drafts[0] == drafts[1]
    assert has_fingerprint(target, weights.config["eyas"]["target_fingerprint"])


def test_a_published_prefix_layer_is_the_base_models(target: Target) -> None:
    """Guards Hydra++ heads without a record of ours: the layer takes its sizes from a LLaMA target,
    and from no other."""
    weights = make("hydra", target, **PLUS).weights()
    published = checkpoints.Weights("hydra", {**weights.config, "layer": None}, weights.tensors, "there")
    assert Method.load(published, target).shape == make("hydra", target, **PLUS).shape
    with pytest.raises(CheckpointError, match="known here for LLaMA with plain RoPE; the target is qwen2"):
        Method.load(published, Target(zoo.tiny("qwen2")))


def test_embeddings_of_its_own(target: Target) -> None:
    """Guards `input_embed_fn.weight`: a table like the target's is not kept, another one is what
    the heads read."""
    weights = make("hydra", target).weights()
    table = target.embed(torch.arange(target.vocab_size))
    for own, kept in ((table, False), (table + 1, True)):
        held = checkpoints.Weights("hydra", weights.config, {**weights.tensors, "embed.weight": own}, "there")
        drafter = Method.load(held, target)
        assert ("embed.weight" in drafter.weights().tensors) == kept
        assert torch.equal(drafter.embed(torch.tensor([3]))[0], own[3])


def test_heads_of_another_model(target: Target) -> None:
    """Guards strict loading: sizes that are not the target's, a head of another method, a missing tensor."""
    weights = make("hydra", target, **PLUS).weights()
    with pytest.raises(CheckpointError, match="vocabulary is 7"):
        Method.load(checkpoints.Weights("hydra", {**weights.config, "vocab_size": 7}, weights.tensors, "there"), target)
    with pytest.raises(CheckpointError, match="holds a head of medusa, not of hydra"):
        Method.load(checkpoints.Weights("medusa", {}, {}, "there"), target)
    held = {name: value for name, value in weights.tensors.items() if name != "prefix.norm.weight"}
    with pytest.raises(CheckpointError, match=r"missing prefix\.norm\.weight"):
        Method.load(checkpoints.Weights("hydra", weights.config, held, "there"), target)


# --- training --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["tokens", "distribution"])
@pytest.mark.parametrize("options", [{}, PLUS], ids=["mlp", "prefix-mlp"])
def test_the_loss_by_hand(target: Target, objective: str, options: dict[str, Any]) -> None:
    """Guards shifts, the tokens on the path, documents' ends, what counts and the bias; and the
    gradient, against the plain formula."""
    drafter = make("hydra", target, **options, objective=objective, **{"head.count": 3})
    with torch.no_grad():
        for k in range(3):
            drafter.net.lm_head[k].bias.normal_(generator=torch.Generator().manual_seed(k))
    batch = heads.batch_of(target, target.num_layers)
    found = drafter.loss(batch)
    every_ND = drafter.net.packed(batch.features_NF, torch.arange(len(batch.tokens_N)), batch.documents)
    places = heads.predictions(batch, 3)
    total, right = torch.zeros(()), 0
    for k, t, goal in places:
        logits_V = drafter.head(torch.cat([every_ND[t], target.embed(batch.tokens_N[t + 1 : t + 2 + k]).flatten()]))
        law_V = heads.training_target(batch, target, goal, objective)
        total = total - (law_V * logits_V.log_softmax(-1)).sum()
        right += int(k == 2 and logits_V.argmax() == law_V.argmax())
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    assert int(found.count) == sum(k == 0 for k, _, _ in places)
    assert int(found.sums["accuracy of head 3"]) == right
    names = [name for name, _ in drafter.net.named_parameters()]
    mine = torch.autograd.grad(found.total, list(drafter.net.parameters()))
    plain = torch.autograd.grad(total, list(drafter.net.parameters()))
    for name, a, b in zip(names, mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("options", [{}, PLUS], ids=["mlp", "prefix-mlp"])
def test_a_batch_in_which_nothing_counts(target: Target, options: dict[str, Any]) -> None:
    """Guards prompts without answers: a loss of 0 that can be sent backward."""
    batch = heads.batch_of(target, target.num_layers)
    batch.counted_N[:] = False
    found = make("hydra", target, **options).loss(batch)
    found.total.backward()
    assert (found.total.item(), int(found.count)) == (0.0, 0)


@pytest.mark.cover(options=1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"objective": "tokens"}, PLUS], ids=str)
def test_trained_a_little(target: Target, tmp_path: Path, options: dict[str, Any]) -> None:
    """Guards the way through the trainer: the held-out loss falls, the chain's figures are there,
    the best head is saved, text stays."""
    drafter = make("hydra", target, "init_for_training", **options)
    first, losses, figures = heads.short_training(drafter, tmp_path)
    assert losses[-1]["loss"] < min(losses[0]["loss"], 0.95 * first)  # what is left of the law's is mostly its entropy
    assert {"0-alpha", "chain tau", "tau"} <= figures.keys()
    again = Method.load(checkpoints.load(tmp_path), target)
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in drafter.net.state_dict().items())
    request = Request((1, 8, 4, 23), 12, Sampling(0.9, seed=2))
    assert run(Decoder(target, again), [request])[0] == [plain_decode(target.model, request)]


def test_what_is_studied(target: Target) -> None:
    """Guards `eyas features`: the final feature is all that the loss reads."""
    assert (
        layers_for_training(target, [(Method, None)])
        == (target.num_layers,)
        == make("hydra", target).train_feature_layers
    )


def test_chains_are_no_deeper_than_heads(target: Target) -> None:
    """Guards the figures of training, which ask for a depth of 5 whatever the method has."""
    drafter = make("hydra", target, "init_for_training", **PLUS, **{"window.size": 9})
    assert [drafter.chain(depth).describe()["nodes"] for depth in (1, 4, 5)] == [2, 5, 5]
    assert drafter.chain(2).window() == (4, 9)
