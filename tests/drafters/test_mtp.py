"""mtp: a published module is transformers' own, drafts are verified, a trained module comes back from its folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpModel

import eyas
import heads
import zoo
from eyas import checkpoints
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import mtp
from eyas.drafters._mtp_net import LayoutCache, _twin, llama_net, load_net
from eyas.errors import CheckpointError
from eyas.nn import Documents, DraftKVCache
from eyas_train import exports
from eyas_train.own_outputs import module_steps
from reference import plain_decode, run

TREE = {"tree.nodes": 10, "tree.depth": 4, "tree.branch": 3}


def published(module: torch.nn.Module, layers: int | None) -> dict[str, Tensor]:
    """The module's tensors under names of Qwen3.5 (`layers` None), or of DeepSeek-V3 and GLM behind those layers."""
    qwen = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    deepseek = {"post_norm": "shared_head.norm"}
    tensors: dict[str, Tensor] = {}
    for name, weight in module.state_dict().items():
        part, _, rest = name.partition(".")
        if part == "mtp_block":
            tensors |= by_expert(f"mtp.layers.0.{rest}" if layers is None else f"model.layers.{layers}.{rest}", weight)
        else:
            prefix = f"mtp.{qwen[part]}" if layers is None else f"model.layers.{layers}.{deepseek.get(part, part)}"
            tensors[f"{prefix}.{rest}"] = weight.clone()
    return tensors


def by_expert(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A tensor as checkpoints hold it: experts one by one."""
    stem, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        gate, up = weight.chunk(2, dim=1)
        return {
            f"{stem}.{e}.{k}_proj.weight": w[e].clone()
            for k, w in (("gate", gate), ("up", up))
            for e in range(len(weight))
        }
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": part.clone() for e, part in enumerate(weight)}
    return {name: weight.clone()}


def glm4_moe() -> PreTrainedModel:
    return zoo.tiny(
        "glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1
    )


def with_module(family: str, folder: Path) -> tuple[Target, mtp.Method]:
    """A random target whose checkpoint in `folder` has a random module too, and that module."""
    model = (zoo.FAMILIES | zoo.HYBRIDS | {"glm4_moe": glm4_moe})[family]()
    target = Target(model)
    made = mtp.Method.random(target, build_options(mtp.Options, TREE), seed=5)
    model.save_pretrained(folder)
    layers = None if family.startswith("qwen") else target.num_layers
    whole = load_file(folder / "model.safetensors") | published(made.net.module, layers)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return target, made


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_the_published_module_is_transformers(family: str, tmp_path: Path) -> None:
    """Bug: a tensor's name, halves of the projection, positions or the mask are wrong, or parts of a text."""
    target, made = with_module(family, tmp_path)
    loaded = mtp.Method.from_pretrained(tmp_path, target)
    assert isinstance(loaded, mtp.Method)
    for name, weight in made.net.state_dict().items():
        assert torch.equal(loaded.net.state_dict()[name], weight), name
    ids_1N = torch.arange(3, 15)[None]
    theirs: Any = MtpModel.from_pretrained(_twin(target, str(tmp_path)))
    with torch.no_grad():
        hidden_1ND = target.encode(ids_1N, (target.num_layers,))
        embeddings_1ND, position_1N = target.embed(ids_1N.roll(-1)), torch.arange(12)[None]
        expected = theirs.forward_layer(0, hidden_1ND, position_1N + 1, DynamicCache(), inputs_embeds=embeddings_1ND)
        cache = LayoutCache(loaded.net.layout(target.dtype, target.device), 1, target.dtype, target.device)
        for begin, end in ((0, 7), (7, 9), (9, 12)):
            slots_1N, part = position_1N[:, begin:end], slice(begin, end)
            cache.prepare(range(1), lambda slots_1N=slots_1N: slots_1N, end)
            cache.set_mask(torch.tensor([begin]), torch.ones(1, end - begin, end - begin).tril().bool())
            read = loaded.net.store_kv if not begin else loaded.net
            got = read(hidden_1ND[:, part], embeddings_1ND[:, part], slots_1N, cache)
            if begin:
                assert torch.allclose(got, expected[:, part], atol=1e-5)


@pytest.mark.cover(family=1)
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "glm4_moe"])
def test_lossless(family: str, tmp_path: Path) -> None:
    """Guards sessions on the families that publish modules: plain decoding's text, for rows of different ages."""
    target, _ = with_module(family, tmp_path)
    drafter = mtp.Method.from_pretrained(tmp_path, target, build_options(mtp.Options, TREE))
    laws = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=9, seed=4))
    requests = [Request(tuple(range(5, 5 + n)), 14, law) for n, law in zip((4, 21, 9), laws, strict=True)]
    tokens, _ = run(Decoder(target, drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]


def test_a_target_without_a_module(tmp_path: Path) -> None:
    """Bug: a module that is not there drafts with random weights, or ends in a traceback."""
    model = zoo.FAMILIES["llama"]()
    with pytest.raises(CheckpointError, match="pass the one that has them with --draft"):
        mtp.Method.from_pretrained(None, Target(model))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights of multi-token-prediction modules for a llama"):
        mtp.Method.from_pretrained(tmp_path, Target(model))


# --- training


def target_of(family: str) -> Target:
    return Target((zoo.FAMILIES | zoo.HYBRIDS)[family]())


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@torch.no_grad()
def test_steps_of_training_are_those_of_drafting(family: str) -> None:
    """Guards documents, positions, masks, order: a slot's pairs and the steps behind it are one causal text."""
    target = target_of(family)
    drafter, steps, lengths, rows_M = mtp.Method.random(target, seed=4), 3, (7, 6), torch.tensor([0, 2, 4, 8, 9])
    ids_N = torch.randint(target.vocab_size, (13,), generator=torch.Generator().manual_seed(1))
    features_ND = torch.cat([target.encode(part[None], drafter.feature_layers)[0] for part in ids_N.split(lengths)])
    embed = lambda index: drafter.embed(ids_N[index])  # noqa: E731
    found = module_steps(drafter.net, features_ND, embed, rows_M, Documents(lengths), steps)
    for m, row in enumerate(rows_M.tolist()):
        begin = 0 if row < 7 else 7
        hidden_ND, embeddings_ND = features_ND[begin : row + 1], embed(torch.arange(begin, row + 1) + 1)
        for step in range(steps):
            N = len(hidden_ND)
            causal_11NN = torch.full((N, N), -torch.inf).triu(1)[None, None]
            given = hidden_ND[None], embeddings_ND[None], torch.arange(N)[None], None, causal_11NN
            output_ND = drafter.net.run(*given)[0]
            torch.testing.assert_close(found[step][m], output_ND[-1], atol=1e-5, rtol=1e-4)
            hidden_ND = torch.cat([hidden_ND, output_ND[-1:]])
            embeddings_ND = torch.cat([embeddings_ND, embed(torch.tensor([min(row + 2 + step, 12)]))])


def test_loss_is_the_cross_entropy_of_every_step() -> None:
    """Guards which token a step is compared with, what counts, and the weights of steps."""
    target = target_of("llama")
    drafter = mtp.Method.random(target, build_options(mtp.Options, {"ttt.steps": 3, "ttt.decay": 0.5}), seed=2)
    batch = heads.batch_of(target, target.num_layers)
    counted = heads.predictions(batch, 3)
    rows = sorted({t for _, t, _ in counted})
    embed = lambda index: drafter.embed(batch.tokens_N[index])  # noqa: E731
    outputs = module_steps(drafter.net, batch.features_NF, embed, torch.tensor(rows), batch.documents, 3)
    expected = torch.zeros(())
    for step, t, goal in counted:
        p_V = heads.training_target(batch, target, goal, "distribution")
        expected = expected - 0.5**step * (p_V * target.head(outputs[step][rows.index(t)]).log_softmax(-1)).sum()
    loss = drafter.loss(batch)
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == sum(step == 0 for step, _, _ in counted)
    loss.total.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in drafter.net.parameters())


@pytest.mark.slow
def test_a_trained_module_comes_back(tmp_path: Path) -> None:
    """Guards the form on disk, the method that a folder chooses, heads of another target, and the text."""
    target = heads.tiny_target()
    drafter = mtp.Method.init_for_training(target, seed=1)
    first, losses, figures = heads.short_training(drafter, tmp_path / "head", steps=20)
    assert losses[-1]["loss"] < losses[0]["loss"] < first
    assert figures["tau"] >= 1
    tree = {"nodes": 8, "depth": 3, "branch": 2}
    llm = eyas.load(target.model, tmp_path / "head", tokenizer=False, kernels="off", tree=tree)
    assert isinstance(llm.drafter, mtp.Method)
    stored = checkpoints.load(tmp_path / "head").tensors
    assert all(torch.equal(stored[name], weight) for name, weight in llm.drafter.net.state_dict().items())
    for request in (Request((5, 6, 7), 12), Request((9, 4), 12, Sampling(1.0, seed=3))):
        decoder = Decoder(target, llm.drafter)
        assert run(decoder, [request])[0] == [list(plain_decode(target.model, request))]
    with pytest.raises(CheckpointError, match=r"layer of a llama, but the target is a qwen2"):
        mtp.Method.from_pretrained(tmp_path / "head", target_of("qwen2"))


# --- the same module by eyas' own layer


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@torch.no_grad()
def test_our_layer_computes_what_transformers_does(family: str) -> None:
    """Guards each weight's place, biases, RoPE and its offset: a text in parts against transformers' layer."""
    target = target_of(family)
    drafter = mtp.Method.random(target, seed=6)
    for weight in drafter.net.parameters():  # norms and biases of random nets are all alike
        weight.add_(0.3 * torch.randn_like(weight))
    own = llama_net(drafter.net)
    hidden_1ND = target.encode(torch.arange(3, 15)[None], (target.num_layers,))
    embeddings_1ND, position_1N = target.embed(torch.arange(4, 16)[None]), torch.arange(12)[None]
    causal_11NN = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    expected = drafter.net.run(hidden_1ND, embeddings_1ND, position_1N, None, causal_11NN)
    shape = own.layer.attention.shape
    cache = DraftKVCache(shape.num_kv_heads, shape.head_dim, 1, target.dtype, target.device, None)
    for begin, end in ((0, 7), (7, 9), (9, 12)):
        slots_1N, part = position_1N[:, begin:end], slice(begin, end)
        cache.prepare(range(1), lambda slots_1N=slots_1N: slots_1N, end)
        cache.set_mask(torch.tensor([begin]), torch.ones(1, end - begin, end - begin).tril().bool())
        if begin:
            got = own(hidden_1ND[:, part], embeddings_1ND[:, part], slots_1N, cache)
            torch.testing.assert_close(got, expected[:, part], atol=1e-5, rtol=1e-4)
        else:
            own.store_kv(hidden_1ND[:, part], embeddings_1ND[:, part], slots_1N, cache)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_a_module_is_stitched_into_its_target(family: str, tmp_path: Path) -> None:
    """Guards names and shards: the copy is the target with the new module, whose other weights stay."""
    target, old = with_module(family, tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    head = mtp.Method.random(target, build_options(mtp.Options, TREE), seed=6)
    checkpoints.save(head.weights(), tmp_path / "head")
    known = checkpoints.ExportTarget(str(tmp_path / "target"))
    lines = exports.export(checkpoints.load(tmp_path / "head"), "checkpoint", tmp_path / "out", known)
    assert any("--speculative-config" in line for line in lines)
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
    stitched = load_net(target, tmp_path / "out").state_dict()
    assert stitched.keys() == head.net.state_dict().keys()
    for name, weight in head.net.state_dict().items():
        torch.testing.assert_close(stitched[name], weight)
    again = type(target.model).from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(again(ids).logits, target.model(ids).logits)
    assert not all(torch.equal(a, b) for a, b in zip(old.net.state_dict().values(), stitched.values(), strict=True))
