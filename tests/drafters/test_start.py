"""The first weights of draft nets, fitted by least squares."""

import pytest
import torch

import zoo
from eyas import drafters
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.drafters import Batch, DraftMethod, eagle3
from eyas.drafters._eagle3_net import LaterLayer
from eyas.nn import Attention, Documents, LayerShape
from eyas_train.data import Example
from eyas_train.packed import QueryRows, attend_packed
from eyas_train.start import attend_to_itself, copy_layer, fit_of, fit_start, own_attention

LENGTHS = (90, 120, 60)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_to_itself_is_the_map(kv_heads: int) -> None:
    """Guards factors and groups of heads: half as many values give the best map of half the rank."""
    shape = LayerShape(32, 48, 4, kv_heads, 8)
    attention, inputs_MX = Attention(shape, 64), torch.randn(600, 64, generator=generator(2))
    map_YX = torch.randn(32, 64, generator=generator(3))
    attend_to_itself(attention, map_YX, inputs_MX)
    outputs_MY = inputs_MX @ map_YX.T
    found_MY = own_attention(attention, inputs_MX).detach()
    error = (found_MY - outputs_MY).square().sum() / outputs_MY.square().sum()
    smallest_first = torch.linalg.eigvalsh(outputs_MY.T @ outputs_MY)
    lost = smallest_first[: 32 - kv_heads * 8].sum() / smallest_first.sum()
    assert float(error) == pytest.approx(float(lost), abs=1e-3)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_copied_layer_computes_the_targets(kv_heads: int) -> None:
    """Guards which norm is which, and keys and values that are repeated for more heads."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    target = Target(zoo.tiny("llama", **sizes, num_key_value_heads=2))
    config = target.model.config
    shape = LayerShape(64, 96, 4, kv_heads, 16, config.rms_norm_eps, config.rope_parameters["rope_theta"])
    layer = LaterLayer(shape)
    assert copy_layer(layer, layer.input_norm, target.family.layers[-1])
    L, tokens = target.num_layers, torch.randint(3, zoo.VOCAB, (1, 30), generator=generator(6))
    before_ND, after_ND = target.encode(tokens, (L - 1, L))[0].chunk(2, dim=1)
    documents, rows = Documents((30,)), torch.arange(30)
    x_ND, position_N = layer.input_norm(before_ND), documents.position_N()
    keys = layer.attention.rotated_key_value(x_ND, position_N)
    with torch.no_grad():
        attended = attend_packed(layer.attention, x_ND, position_N, QueryRows(rows, documents.lengths), keys)
        found = target.family.base.norm(layer.finish(before_ND, attended))  # type: ignore[operator]
    torch.testing.assert_close(found, after_ND, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "most"), [
    ("eagle1", {}, 0.8),
    ("mtp", {}, 0.94),
    ("eagle3", {"head.layers": "0,1,3"}, 0.93),
    ("eagle3", {"head.layers": "0,1,3", "head.depth": 2, "head.norm_output": True, "head.fc_norm": True}, 0.95),
    ("peagle", {"head.layers": "0,1,3"}, 1.0),
])  # fmt: skip
def test_the_first_loss_is_lower(name: str, options: dict[str, object], most: float) -> None:
    """Guards goals and inputs by the loss on other texts; with a wrong goal the shares were 0.92 to 1.01."""
    target, kind = Target(zoo.tiny("llama", num_hidden_layers=4)), drafters.find(name)
    drafter = kind.init_for_training(target, build_options(kind.Options, options), 1)
    before = loss_of(drafter, 1)
    found = fit_of(drafter)
    assert "explain" in found.fit(batch_of(drafter, found.layers, 0, 40))
    assert loss_of(drafter, 1) < most * before
    again = kind.init_for_training(target, build_options(kind.Options, options), 1)
    same_fit = fit_of(again)
    same_fit.fit(batch_of(drafter, found.layers, 0, 40))
    same = again.net.state_dict()
    equal = [torch.equal(value, same[key]) for key, value in drafter.net.state_dict().items()]
    assert all(equal), "another process differs"


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "mtp"])
def test_a_target_in_bfloat16_is_fitted_in_float32(name: str) -> None:
    """Bug: products of unlike dtypes ended a training with --dtype bfloat16."""
    target, kind = Target(zoo.tiny("llama", num_hidden_layers=7).to(torch.bfloat16)), drafters.find(name)
    drafter = kind.init_for_training(target, build_options(kind.Options, {}), 1)
    texts = [torch.randint(3, zoo.VOCAB, (60,), generator=generator(n)).tolist() for n in range(40)]
    examples = [Example(text, [True] * 60) for text in texts]
    assert "explain" in fit_start(drafter, examples, 300, 1)
    assert {value.dtype for value in drafter.net.parameters()} == {torch.bfloat16}


def batch_of(drafter: DraftMethod, layers: tuple[int, ...], seed: int, times: int = 1) -> Batch:
    """Random texts whose tokens all count."""
    lengths = LENGTHS * times
    tokens = torch.randint(3, zoo.VOCAB, (sum(lengths),), generator=generator(seed))
    features = torch.cat([drafter.target.encode(part[None], layers)[0] for part in tokens.split(lengths)])
    return Batch(tokens, features, torch.ones(len(tokens), dtype=torch.bool), Documents(lengths))


@torch.no_grad()
def loss_of(drafter: DraftMethod, seed: int) -> float:
    drafter.net.eval()
    return float(drafter.loss(batch_of(drafter, drafter.train_feature_layers, seed)).total)


OPTIONS = {"head.layers": "0,1,2"}


def test_a_random_eagle3_drafts_as_many_tokens_as_published_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a head over the whole vocabulary, four times the bytes of a published one, is timed."""
    target, kind = Target(zoo.FAMILIES["llama"]()), drafters.find("eagle3")
    own = build_options(kind.Options, OPTIONS)
    assert kind.random(target, own).draft_ids_v is None, "a small vocabulary is drafted whole"
    monkeypatch.setattr(eagle3, "MAX_DRAFT_VOCABULARY", 32)
    for options, size in ((OPTIONS, 32), ({**OPTIONS, "head.draft_vocab": 50}, 50)):
        head = kind.random(target, build_options(kind.Options, options))
        ids = head.draft_ids_v.tolist()
        assert head.net.head.out_features == len(set(ids)) == size
        assert ids == sorted(ids)
        assert ids[-1] >= zoo.VOCAB - zoo.VOCAB / size - 1, "spread over the vocabulary"
    assert kind.random(target, own, draft_ids_v=torch.tensor([3, 5])).net.head.out_features == 2
    assert kind.init_for_training(target, own).draft_ids_v is None, "a new head's tokens come from data"
