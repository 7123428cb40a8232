"""Heads of Medusa and of Hydra: what they foretell, the trees they draft, how they are trained; Hydra's see the tokens of
their own path, and Hydra++ has a layer before them."""

from __future__ import annotations

import itertools
import json
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
from eyas.core.tree import Draft
from eyas.errors import CheckpointError, OptionError
from eyas.targets.fingerprints import has_fingerprint
from eyas_lab.methods import method_hydra, method_medusa
from eyas_lab.methods._heads import REFERENCE_TREE
from eyas_lab.methods.method_medusa import Options
from eyas_train.features import layers_for_training
from heads import features, make, roots_of
from reference import SAMPLINGS, run

METHODS: dict[str, Any] = {"medusa": method_medusa.Method, "hydra": method_hydra.Method}
PLUS = {"head.arch": "prefix-mlp", "head.blocks": 2}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"tree.choices": "reference"}),
    ("medusa", {"tree.choices": "reference", "tree.noise": "none", "head.count": 2}),
    ("medusa", {"tree.choices": "chain-1", "head.output": "target"}),
    ("medusa", {"tree.choices": "dynamic", "tree.nodes": 1, "head.blocks": 2}),
    ("hydra", {"tree.choices": "reference", "tree.noise": "none", "head.blocks": 2}),
    ("hydra", {"tree.choices": "chain", "head.count": 2}),
    ("hydra", {"tree.choices": "reference", **PLUS}),
    ("hydra", {"tree.choices": "dynamic", "tree.nodes": 12, "window.size": 7, "window.sink": 2, **PLUS}),
]
ARCHITECTURES = pytest.mark.parametrize(
    ("method", "options"), [("medusa", {}), ("hydra", {}), ("hydra", PLUS)], ids=["medusa", "hydra", "hydra++"]
)


@torch.inference_mode()
def grown(drafter: Any, feature_BD: Tensor, roots: CycleInput) -> Draft:
    """The draft below features that Hydra++'s layer has read already."""
    below = drafter.grow_below if isinstance(drafter, METHODS["hydra"]) else drafter.grow
    draft: Draft = below(feature_BD, roots)
    return draft


@pytest.mark.cover
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["random", "init_for_training"])
def test_same_text_as_plain_decoding(
    target: Target, answered: list[tuple[Request, list[int]]], shape: tuple[str, dict[str, Any]], kind: str
) -> None:
    """Guards losslessness with useless and with half-right heads, at every temperature, rows
    joining and leaving, with penalties."""
    method, options = shape
    tokens, steps = run(Decoder(target, make(method, target, kind, **options), 3), [r for r, _ in answered])
    assert tokens == [expected for _, expected in answered]
    if kind == "init_for_training" and options["tree.choices"] == "reference":  # a fresh head repeats the last law
        assert sum(s.accepted for s in steps) > 0, "which must come true now and then"


def test_a_fresh_head_is_the_targets_own(target: Target) -> None:
    """Guards the beginning of training: every head says what the target's head says, exactly, whatever the path. It is
    asked in the same shape: for another number of rows some processors add up in another order."""
    feature_BD = features(target, 3)
    alone_BV, together_BKV = target.head(feature_BD), target.head(feature_BD[:, None].repeat(1, 4, 1))
    for output, said in (("own", alone_BV[:, None].expand(-1, 4, -1)), ("target", together_BKV)):
        fresh = make("medusa", target, "init_for_training", **{"head.output": output, "head.blocks": 2})
        assert torch.equal(fresh.logits(feature_BD, 4), said)
    hydra = make("hydra", target, "init_for_training", **{"head.blocks": 3})
    for k in range(4):
        path = torch.randn(3, (k + 1) * target.hidden_size, generator=torch.Generator().manual_seed(k))
        torch.testing.assert_close(hydra.head(torch.cat([feature_BD, path], dim=-1)), alone_BV)


@pytest.mark.quick("medusa", "hydra")
@ARCHITECTURES
def test_what_the_heads_read_while_decoding(target: Target, method: str, options: dict[str, Any]) -> None:
    """Guards prefill, commits and Hydra++'s cache: in every cycle the heads read what training reads there, over all true
    features so far, whichever path won."""
    drafter, seen = make(method, target, "init_for_training", **options), list[tuple[int, Tensor, int]]()
    if options:  # a layer that does something
        drafter.net.prefix.load_state_dict(make("hydra", target, **options).net.prefix.state_dict())
    name = "grow" if method == "medusa" else "grow_below"
    below = getattr(drafter, name)

    def spy(feature_BD: Tensor, roots: CycleInput) -> Any:
        seen.append((int(roots.position_B[0]), feature_BD[0].clone(), int(roots.tokens_B[0])))
        return below(feature_BD, roots)

    setattr(drafter, name, spy)
    prompt = tuple(range(5, 25))
    ((tokens,), steps) = run(Decoder(target, drafter, 1), [Request(prompt, 16)])
    ids = torch.tensor([*prompt, *tokens])
    expected_TD = target.encode(ids[None], (target.num_layers,))[0]
    if method == "hydra":
        expected_TD = drafter.net.packed(expected_TD, torch.arange(len(ids)), heads.Documents((len(ids),)))
    assert len(seen) > 3
    assert options or sum(s.accepted for s in steps) > 0
    for position, feature_D, root in seen:
        assert root == ids[position]
        torch.testing.assert_close(feature_D, expected_TD[position - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
@pytest.mark.parametrize("noise", ["coupled", "none"])
def test_tokens_of_a_fixed_tree(target: Target, sampling: Sampling, noise: str) -> None:
    """Guards ranks and levels: a node at depth d is head d's token of its own rank, best first;
    siblings differ; score is log q."""
    drafter, feature_BD = make("medusa", target, **{"tree.noise": noise}), features(target, 2)
    roots = roots_of(2, sampling)
    draft = grown(drafter, feature_BD, roots)
    assert draft.q_BNV is None
    logq_BKV = (drafter.logits(feature_BD, 4) / (sampling.temperature or 1.0)).log_softmax(-1)
    noise_BKV = roots.noise.gumbel(roots.position_B[:, None] + 1 + torch.arange(4), target.vocab_size)
    order_BKV = (logq_BKV + noise_BKV if noise == "coupled" else logq_BKV).argsort(-1, descending=True)
    for b, (n, path) in itertools.product(range(2), enumerate(REFERENCE_TREE, start=1)):
        token = order_BKV[b, len(path) - 1, path[-1]]
        assert draft.tokens_BN[b, n] == token
        torch.testing.assert_close(draft.log_q_BN[b, n], logq_BKV[b, len(path) - 1, token])
        assert draft.tree.depth_BN[b, n] == len(path)


@pytest.mark.quick("sampling0")
@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_children_depend_on_their_path(target: Target, sampling: Sampling) -> None:
    """Guards Hydra's inputs and their order: each node's children are the best of its head over [feature,
    root, path], one node at a time."""
    drafter, roots, feature_BD = make("hydra", target), roots_of(2, sampling), features(target, 2)
    draft = grown(drafter, feature_BD, roots)
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
    assert len(second) > 1 or not sampling.greedy, "the best second token should differ, or this test proves little"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_siblings_differ_where_all_logits_are_equal(target: Target, method: str, sampling: Sampling) -> None:
    """Guards against twins: a head that finds every token equally good still names different ones."""
    drafter = make(method, target)
    with torch.no_grad():
        for weight in drafter.net.parameters():
            weight.zero_()
    draft = grown(drafter, features(target, 1), roots_of(1, sampling))
    siblings = list(zip(draft.tree.parents_BN[0, 1:].tolist(), draft.tokens_BN[0, 1:].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)


def test_a_dynamic_tree_holds_the_most_probable_paths(target: Target) -> None:
    """Guards the choice of nodes: of all paths of two heads' ten best tokens, those with the largest products."""
    drafter = make("medusa", target, **{"tree.choices": "dynamic", "tree.nodes": 20, "head.count": 2})
    feature_BD = features(target, 2)
    draft = grown(drafter, feature_BD, roots_of(2))
    best = drafter.logits(feature_BD, 2).log_softmax(-1).topk(10)
    for b in range(2):
        (one, two), (first, second) = best.values[b].tolist(), best.indices[b].tolist()
        values = {(first[i],): one[i] for i in range(10)}
        values |= {(first[i], second[j]): one[i] + two[j] for i, j in itertools.product(range(10), range(10))}
        parents, tokens = draft.tree.parents_BN[b].tolist(), draft.tokens_BN[b].tolist()
        drafted = {(tokens[n],) if parents[n] == 0 else (tokens[parents[n]], tokens[n]) for n in range(1, 20)}
        assert drafted == set(sorted(values, key=lambda path: -values[path])[:19])


def test_trees(target: Target, tmp_path: Path) -> None:
    """Guards the reference tree (63 nodes: ten, 28, 23 and 2 a level), `--tree.choices FILE`, that more levels than heads
    are refused, and topk against small vocabularies."""
    depths = [len(path) for path in REFERENCE_TREE]
    assert [depths.count(d) for d in (1, 2, 3, 4)] == [10, 28, 23, 2]
    (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [0, 0], [1, 0], [1, 0, 0]]))
    choices = {"tree.choices": str(tmp_path / "tree.json")}
    drafter = make("medusa", target, **choices)
    assert grown(drafter, features(target, 1), roots_of(1)).tree.parents_BN.tolist() == [[-1, 0, 0, 1, 2, 4]]
    assert drafter.describe()["depth"] == 3
    with pytest.raises(OptionError, match="3 deep, and one level needs one head: this draft has 2"):
        make("medusa", target, **choices, **{"head.count": 2})
    with pytest.raises(OptionError, match="9 children, the vocabulary 8"):
        Options().tree.__class__(tuple((rank,) for rank in range(9))).for_heads(4, 8)
    assert max(map(max, Options().tree.for_heads(2, 3))) == 2


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("medusa", {"tree.nodes": 9}, "nodes"), ("medusa", {"tree.noise": "both"}, "noise"), ("medusa", {"head.count": 0}, "count"),
        ("medusa", {"head.blocks": 0}, "blocks"), ("medusa", {"head.output": "none"}, "output"),
        ("medusa", {"objective": "law of p"}, "objective"), ("hydra", {"window.size": 8}, "leave --window"),
        ("hydra", {"head.arch": "cross-attn"}, "head.arch"), ("hydra", {"head.count": 0}, "head.count"),
        ("hydra", {"objective": "words"}, "objective"),
        ("hydra", {"tree.choices": "chain-5"}, "5 deep, and one level needs one head: this draft has 4"),
    ],
)  # fmt: skip
def test_impossible_options(target: Target, method: str, options: dict[str, Any], said: str) -> None:
    """Guards against options that would be ignored or misread."""
    with pytest.raises(OptionError, match=said):
        make(method, target, **options)


@pytest.mark.quick("medusa-*", "hydra-options2")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("medusa", {"head.output": output, "head.blocks": 2, "head.count": 3}) for output in ("own", "target")),
        ("hydra", {"head.blocks": 3}),
        ("hydra", PLUS),
    ],
)
def test_saved_and_loaded(target: Target, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    """Guards `weights` and `load` through the published format: the same weights and drafts, bit by bit, and
    the target's fingerprint."""
    drafter = make(method, target, **options)
    checkpoints.save(drafter.weights(), tmp_path)
    weights = checkpoints.load(tmp_path)
    again = METHODS[method].load(weights, target)
    assert drafter.net.state_dict().keys() == again.net.state_dict().keys()
    assert all(map(torch.equal, drafter.net.state_dict().values(), again.net.state_dict().values()))
    request = Request(tuple(range(5, 16)), 10)
    steps = [run(Decoder(target, one), [request])[1] for one in (drafter, again)]
    first, second = ([s.draft.tokens_BN.tolist() for s in made if s.draft] for made in steps)
    assert first == second
    assert has_fingerprint(target, weights.config["eyas"]["target_fingerprint"])
    assert method == "hydra" or weights.config["base_model"] == "tiny-llama"


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("medusa", {"hidden_size": 7}, "hidden size is 7"), ("medusa", {"vocab_size": 7}, "vocabulary is 7"),
        ("hydra", {"vocab_size": 7}, "vocabulary is 7"), ("medusa", "blocks.2.0.bias", r"missing blocks\.2\.0\.bias"),
        ("hydra", "prefix.norm.weight", r"missing prefix\.norm\.weight"),
        ("medusa", None, "holds a head of eagle1, not of medusa"), ("hydra", None, "holds a head of eagle1, not of hydra"),
    ],
)  # fmt: skip
def test_heads_of_another_model(target: Target, method: str, change: Any, said: str) -> None:
    """Guards strict loading: sizes that are not the target's, a head of another method, a missing tensor, none at all."""
    weights = make(method, target, **(PLUS if method == "hydra" else {})).weights()
    config = {**weights.config, **(change if isinstance(change, dict) else {})}
    held = {name: value for name, value in weights.tensors.items() if name != change}
    kind = method if change else "eagle1"
    with pytest.raises(CheckpointError, match=said):
        METHODS[method].load(checkpoints.Weights(kind, config, held, "there"), target)
    with pytest.raises(CheckpointError, match="--draft"):
        METHODS[method].load(None, target)


def test_a_published_prefix_layer_is_the_base_models(target: Target) -> None:
    """Guards Hydra++ heads without a record of ours: the layer takes its sizes from a LLaMA target,
    and from no other."""
    weights = make("hydra", target, **PLUS).weights()
    published = checkpoints.Weights("hydra", {**weights.config, "layer": None}, weights.tensors, "there")
    assert METHODS["hydra"].load(published, target).shape == make("hydra", target, **PLUS).shape
    with pytest.raises(CheckpointError, match="known here for LLaMA with plain RoPE; the target is qwen2"):
        METHODS["hydra"].load(published, Target(zoo.tiny("qwen2")))


def test_embeddings_of_its_own(target: Target) -> None:
    """Guards `input_embed_fn.weight`: a table like the target's is not kept, another one is what the heads read."""
    weights = make("hydra", target).weights()
    table = target.embed(torch.arange(target.vocab_size))
    for own, kept in ((table, False), (table + 1, True)):
        held = checkpoints.Weights("hydra", weights.config, {**weights.tensors, "embed.weight": own}, "there")
        drafter = METHODS["hydra"].load(held, target)
        assert ("embed.weight" in drafter.weights().tensors) == kept
        assert torch.equal(drafter.embed(torch.tensor([3]))[0], own[3])


@pytest.mark.parametrize("objective", ["tokens", "distribution"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("medusa", {"head.output": "own"}), ("medusa", {"head.output": "target"}), ("hydra", {}), ("hydra", PLUS)],
    ids=["own", "target", "mlp", "prefix-mlp"],
)
def test_the_loss_by_hand(target: Target, objective: str, method: str, options: dict[str, Any]) -> None:
    """Guards shifts, weights, the tokens on the path, documents' ends, what counts and the bias; and the gradient,
    against the plain formula."""
    drafter = make(method, target, **options, objective=objective, **{"head.count": 3})
    batch = heads.batch_of(target, target.num_layers)
    every_ND = batch.features_NF
    if method == "hydra":
        with torch.no_grad():
            for k in range(3):
                drafter.net.lm_head[k].bias.normal_(generator=torch.Generator().manual_seed(k))
        every_ND = drafter.net.packed(batch.features_NF, torch.arange(len(batch.tokens_N)), batch.documents)
    found, places = drafter.loss(batch), heads.predictions(batch, 3)
    total, right = torch.zeros(()), [0, 0, 0]
    for k, t, goal in places:
        if method == "medusa":
            weight, logits_V = 0.8**k, drafter.logits(every_ND[t : t + 1], 3)[0, k]
        else:
            path = target.embed(batch.tokens_N[t + 1 : t + 2 + k]).flatten()
            weight, logits_V = 1.0, drafter.head(torch.cat([every_ND[t], path]))
        law_V = heads.training_target(batch, target, goal, objective)
        total = total - weight * (law_V * logits_V.log_softmax(-1)).sum()
        right[k] += int(logits_V.argmax() == law_V.argmax())
    assert len(places) > 12
    torch.testing.assert_close(found.total, total, rtol=1e-4, atol=1e-4)
    assert int(found.count) == sum(k == 0 for k, _, _ in places)
    assert [int(found.sums["accuracy"]), int(found.sums["accuracy of head 3"])] == [right[0], right[2]]
    names = [name for name, _ in drafter.net.named_parameters()]
    mine, plain = (torch.autograd.grad(loss, list(drafter.net.parameters())) for loss in (found.total, total))
    for name, a, b in zip(names, mine, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@ARCHITECTURES
def test_a_batch_in_which_nothing_counts(target: Target, method: str, options: dict[str, Any]) -> None:
    """Guards prompts without answers: a loss of 0 that can be sent backward."""
    batch = heads.batch_of(target, target.num_layers)
    batch.counted_N[:] = False
    found = make(method, target, **options).loss(batch)
    found.total.backward()
    assert (found.total.item(), int(found.count)) == (0.0, 0)


@ARCHITECTURES
def test_what_training_asks(target: Target, method: str, options: dict[str, Any]) -> None:
    """Guards `eyas features`, for which the final feature is all that the loss reads, and the figures of training, which
    ask for a depth of 5 whatever the method has."""
    drafter = make(method, target, "init_for_training", **options, **({"window.size": 9} if options else {}))
    assert (
        layers_for_training(target, [(METHODS[method], None)]) == (target.num_layers,) == drafter.train_feature_layers
    )
    assert [drafter.chain(depth).describe()["nodes"] for depth in (1, 4, 5)] == [2, 5, 5]
    assert not options or drafter.chain(2).window() == (4, 9)
