"""Medusa's heads: what they foretell, the trees they draft, how they are trained."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heads
from eyas import checkpoints
from eyas.core.drafter import CycleInput
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import CheckpointError, OptionError
from eyas.targets.fingerprints import has_fingerprint
from eyas_lab.methods.method_medusa import REFERENCE_TREE, Method, Options
from eyas_train.features import layers_for_training
from heads import features, make, roots_of
from reference import SAMPLINGS, plain_decode, run

SHAPES: list[dict[str, Any]] = [
    {"tree.choices": "reference"},
    {"tree.choices": "reference", "tree.noise": "none", "head.count": 2},
    {"tree.choices": "chain"},
    {"tree.choices": "chain-1", "head.output": "target"},
    {"tree.choices": "dynamic", "tree.nodes": 12, "head.blocks": 2},
    {"tree.choices": "dynamic", "tree.nodes": 1},
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
    tokens, steps = run(Decoder(target, make("medusa", target, kind, **options), 3), [r for r, _ in answered])
    assert tokens == [expected for _, expected in answered]
    if kind == "init_for_training" and options["tree.choices"] == "reference":
        assert sum(s.accepted for s in steps) > 0, (
            "a fresh head repeats the last law, which must come true now and then"
        )


def test_a_prompt_that_is_gone_on_with(target: Target) -> None:
    """Guards `truncate`: with reuse a second prompt is read from where the first one's tokens end, and
    the text is the same."""
    decoder = Decoder(target, make("medusa", target, "init_for_training"), 1, reuse=True)
    first = Request(tuple(range(5, 20)), 8)
    ((answer,), _) = run(decoder, [first])
    second = Request((*first.prompt, *answer, 9, 8), 8)
    assert run(decoder, [second])[0] == [plain_decode(target.model, second)]


def test_a_fresh_head_is_the_targets_own(target: Target) -> None:
    """Guards the beginning of training: every head says what the target's head says, exactly. It is
    asked in the same shape: for another number of rows some processors add up in another order."""
    feature_BD = features(target, 3)
    alone_BV, together_BKV = target.head(feature_BD), target.head(feature_BD[:, None].repeat(1, 4, 1))
    for output, said in (("own", alone_BV[:, None].expand(-1, 4, -1)), ("target", together_BKV)):
        logits_BKV = make("medusa", target, "init_for_training", **{"head.output": output, "head.blocks": 2}).logits(
            feature_BD, 4
        )
        assert torch.equal(logits_BKV, said)


def test_the_features_that_heads_read(target: Target) -> None:
    """Guards prefill and commit: in every cycle the heads read the target's feature of the newest
    committed token, whichever path won."""
    drafter, seen = make("medusa", target, "init_for_training"), list[tuple[int, Tensor, int]]()
    grow = drafter.grow

    def spy(feature_BD: Tensor, roots: CycleInput) -> Any:
        seen.append((int(roots.position_B[0]), feature_BD[0].clone(), int(roots.tokens_B[0])))
        return grow(feature_BD, roots)

    drafter.grow = spy
    prompt = tuple(range(5, 25))
    ((tokens,), steps) = run(Decoder(target, drafter, 1), [Request(prompt, 16)])
    whole_TD = target.encode(torch.tensor([[*prompt, *tokens]]), (target.num_layers,))[0]
    assert sum(s.accepted for s in steps) > 0
    assert len(seen) > 3
    for position, feature_D, root in seen:
        assert root == [*prompt, *tokens][position]
        torch.testing.assert_close(feature_D, whole_TD[position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[2]])
@pytest.mark.parametrize("noise", ["coupled", "none"])
def test_tokens_of_a_fixed_tree(target: Target, sampling: Sampling, noise: str) -> None:
    """Guards ranks and levels: a node at depth d is head d's token of its own rank, best first;
    siblings differ; score is log q."""
    drafter, roots = make("medusa", target, **{"tree.noise": noise}), roots_of(2, sampling)
    feature_BD = features(target, 2)
    draft = drafter.grow(feature_BD, roots)
    assert draft.q_BNV is None
    logq_BKV = drafter.logits(feature_BD, 4).log_softmax(-1)
    if noise == "coupled" and not sampling.greedy:
        scaled = drafter.logits(feature_BD, 4) / sampling.temperature
        if sampling.top_k:
            # what is dropped by top-k and top-p has no rank; that siblings differ is checked by
            # verify in every run
            return
        logq_BKV = scaled.log_softmax(-1)
    key_BKV = logq_BKV
    if noise == "coupled":
        key_BKV = logq_BKV + roots.noise.gumbel(roots.position_B[:, None] + 1 + torch.arange(4), target.vocab_size)
    order_BKV = key_BKV.argsort(-1, descending=True)
    for b, (n, path) in itertools.product(range(2), enumerate(REFERENCE_TREE, start=1)):
        token = order_BKV[b, len(path) - 1, path[-1]]
        assert draft.tokens_BN[b, n] == token
        torch.testing.assert_close(draft.log_q_BN[b, n], logq_BKV[b, len(path) - 1, token])
        assert draft.tree.depth_BN[b, n] == len(path)


def test_siblings_differ_where_all_logits_are_equal(target: Target) -> None:
    """Guards against twins: a head that finds every token equally good still names different ones."""
    drafter = make("medusa", target)
    with torch.no_grad():
        for weight in drafter.net.parameters():
            weight.zero_()
    for sampling in SAMPLINGS[:3]:
        draft = drafter.grow(features(target, 1), roots_of(1, sampling))
        parents, tokens = draft.tree.parents_BN[0].tolist(), draft.tokens_BN[0].tolist()
        siblings = list(zip(parents[1:], tokens[1:], strict=True))
        assert len(set(siblings)) == len(siblings)


def test_a_dynamic_tree_holds_the_most_probable_paths(target: Target) -> None:
    """Guards the choice of nodes: of all paths of two heads' ten best tokens, those with the
    largest products."""
    drafter = make("medusa", target, **{"tree.choices": "dynamic", "tree.nodes": 20, "head.count": 2})
    feature_BD = features(target, 2)
    draft = drafter.grow(feature_BD, roots_of(2))
    best = drafter.logits(feature_BD, 2).log_softmax(-1).topk(10)
    for b in range(2):
        (one, two), (first, second) = best.values[b].tolist(), best.indices[b].tolist()
        values = {(first[i],): one[i] for i in range(10)} | {
            (first[i], second[j]): one[i] + two[j] for i, j in itertools.product(range(10), range(10))
        }
        parents, tokens = draft.tree.parents_BN[b].tolist(), draft.tokens_BN[b].tolist()
        drafted = {(tokens[n],) if parents[n] == 0 else (tokens[parents[n]], tokens[n]) for n in range(1, 20)}
        assert drafted == set(sorted(values, key=lambda path: -values[path])[:19])


def test_the_reference_tree() -> None:
    """Guards the constant: 63 nodes, four deep, ten, 28, 23 and 2 a level."""
    depths = [len(path) for path in REFERENCE_TREE]
    assert [depths.count(d) for d in (1, 2, 3, 4)] == [10, 28, 23, 2]


def test_a_tree_of_the_users(target: Target, tmp_path: Path) -> None:
    """Guards `--tree.choices FILE`, and that more levels than heads are refused."""
    (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [0, 0], [1, 0], [1, 0, 0]]))
    drafter = make("medusa", target, **{"tree.choices": str(tmp_path / "tree.json")})
    draft = drafter.grow(features(target, 1), roots_of(1))
    assert draft.tree.parents_BN.tolist() == [[-1, 0, 0, 1, 2, 4]]
    assert drafter.describe()["depth"] == 3
    with pytest.raises(OptionError, match="3 deep, and one level needs one head: this draft has 2"):
        make("medusa", target, **{"tree.choices": str(tmp_path / "tree.json"), "head.count": 2})


@pytest.mark.parametrize(
    "options",
    [
        {"tree.nodes": 9},
        {"tree.noise": "both"},
        {"head.count": 0},
        {"head.blocks": 0},
        {"head.output": "none"},
        {"objective": "law of p"},
    ],
)
def test_impossible_options(target: Target, options: dict[str, Any]) -> None:
    """Guards against options that would be ignored or misread."""
    with pytest.raises(OptionError, match=next(iter(options)).split(".")[-1]):
        make("medusa", target, **options)


def test_a_tree_that_is_wider_than_the_vocabulary(target: Target) -> None:
    """Guards topk against small vocabularies."""
    wide = Options().tree.__class__(tuple((rank,) for rank in range(9)))
    with pytest.raises(OptionError, match="9 children, the vocabulary 8"):
        wide.for_heads(4, 8)
    assert max(map(max, Options().tree.for_heads(2, 3))) == 2


# --- weights ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["own", "target"])
def test_saved_and_loaded(target: Target, tmp_path: Path, output: str) -> None:
    """Guards `weights` and `load` through the published format: the same logits, bit by bit, and
    the target's fingerprint."""
    drafter = make("medusa", target, **{"head.output": output, "head.blocks": 2, "head.count": 3})
    checkpoints.save(drafter.weights(), tmp_path)
    weights = checkpoints.load(tmp_path)
    again, feature_BD = Method.load(weights, target), features(target, 2)
    assert torch.equal(drafter.logits(feature_BD, 3), again.logits(feature_BD, 3))
    assert has_fingerprint(target, weights.config["eyas"]["target_fingerprint"])
    assert weights.config["base_model"] == "tiny-llama"


def test_heads_of_another_model(target: Target) -> None:
    """Guards strict loading: sizes that are not the target's, a head of another method, none at all."""
    weights = make("medusa", target).weights()
    for key, said in (("hidden_size", "hidden size is 7"), ("vocab_size", "vocabulary is 7")):
        other = checkpoints.Weights("medusa", {**weights.config, key: 7}, weights.tensors, "there")
        with pytest.raises(CheckpointError, match=said):
            Method.load(other, target)
    with pytest.raises(CheckpointError, match="holds a head of eagle1, not of medusa"):
        Method.load(checkpoints.Weights("eagle1", {}, {}, "there"), target)
    with pytest.raises(CheckpointError, match="--draft"):
        Method.load(None, target)
    held = {name: value for name, value in weights.tensors.items() if name != "blocks.2.0.bias"}
    with pytest.raises(CheckpointError, match=r"missing blocks\.2\.0\.bias"):
        Method.load(checkpoints.Weights("medusa", weights.config, held, "there"), target)


# --- training --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["tokens", "distribution"])
@pytest.mark.parametrize("output", ["own", "target"])
def test_the_loss_by_hand(target: Target, objective: str, output: str) -> None:
    """Guards shifts, weights, documents' ends and what counts; and the gradient, against the plain
    formula."""
    drafter = make("medusa", target, **{"objective": objective, "head.output": output, "head.count": 3})
    batch = heads.batch_of(target, target.num_layers)
    found = drafter.loss(batch)
    places = heads.predictions(batch, 3)
    total, right = torch.zeros(()), [0, 0, 0]
    for k, t, goal in places:
        logits_V = drafter.logits(batch.features_NF[t : t + 1], 3)[0, k]
        law_V = heads.training_target(batch, target, goal, objective)
        total = total - 0.8**k * (law_V * logits_V.log_softmax(-1)).sum()
        right[k] += int(logits_V.argmax() == law_V.argmax())
    assert len(places) > 12
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    assert int(found.count) == sum(k == 0 for k, _, _ in places)
    assert [int(found.sums["accuracy"]), int(found.sums["accuracy of head 3"])] == [right[0], right[2]]
    names = [name for name, _ in drafter.net.named_parameters()]
    mine = torch.autograd.grad(found.total, list(drafter.net.parameters()))
    plain = torch.autograd.grad(total, list(drafter.net.parameters()))
    for name, a, b in zip(names, mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_a_batch_in_which_nothing_counts(target: Target) -> None:
    """Guards prompts without answers: a loss of 0 that can be sent backward."""
    batch = heads.batch_of(target, target.num_layers)
    batch.counted_N[:] = False
    found = make("medusa", target).loss(batch)
    found.total.backward()
    assert (found.total.item(), int(found.count)) == (0.0, 0)


@pytest.mark.cover(objective=1)
@pytest.mark.slow
@pytest.mark.parametrize("objective", ["tokens", "distribution"])
def test_trained_a_little(target: Target, tmp_path: Path, objective: str) -> None:
    """Guards the way through the trainer: the held-out loss falls, the chain's figures are there,
    the best head is saved, text stays."""
    drafter = make("medusa", target, "init_for_training", objective=objective)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    first, losses, figures = heads.short_training(drafter, tmp_path)
    assert losses[-1]["loss"] < min(losses[0]["loss"], 0.95 * first)  # what is left of the law's is mostly its entropy
    assert {"0-alpha", "chain tau", "tau"} <= figures.keys()
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())
    again = Method.load(checkpoints.load(tmp_path), target)
    assert all(torch.equal(value, again.net.state_dict()[name]) for name, value in drafter.net.state_dict().items())
    request = Request((1, 8, 4, 23), 12, Sampling(0.9, seed=2))
    assert run(Decoder(target, again), [request])[0] == [plain_decode(target.model, request)]


def test_what_is_studied(target: Target) -> None:
    """Guards `eyas features`: the final feature is all that the loss reads."""
    assert (
        layers_for_training(target, [(Method, None)])
        == (target.num_layers,)
        == make("medusa", target).train_feature_layers
    )


def test_chains_are_no_deeper_than_heads(target: Target) -> None:
    """Guards the figures of training, which ask for a depth of 5 whatever the method has."""
    drafter = make("medusa", target, "init_for_training")
    assert [drafter.chain(depth).describe()["nodes"] for depth in (1, 4, 5)] == [2, 5, 5]
