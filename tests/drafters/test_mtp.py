"""mtp: a published module is transformers' own, drafts are verified, a trained module comes back from its folder."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
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
from eyas.drafters import Batch, mtp
from eyas.drafters._mtp_net import LayoutCache, _twin, llama_net, load_net
from eyas.errors import CheckpointError, ModelError, OptionError
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


def test_a_batch_in_which_nothing_counts() -> None:
    target = target_of("llama")
    drafter = mtp.Method.random(target)
    tokens_N = torch.arange(3, 9)
    features_ND = target.encode(tokens_N[None], (target.num_layers,))[0]
    loss = drafter.loss(Batch(tokens_N, features_ND, torch.zeros(6, dtype=torch.bool), Documents((6,))))
    loss.total.backward()
    assert float(loss.total.detach()) == int(loss.count) == 0


def test_a_new_module_predicts_as_the_feature_does() -> None:
    """Guards the beginning of a training: the lm_head reads the same directions, about as large."""
    for family in ("llama", "gemma2"):
        target = target_of(family)
        net = mtp.Method.init_for_training(target).net
        feature_1ND = target.encode(torch.arange(3, 9)[None], (target.num_layers,))
        with torch.no_grad():
            output_1ND = module_steps(net, feature_1ND[0], target.embed, torch.arange(5), Documents((6,)), 1)[0]
        alike = torch.nn.functional.cosine_similarity(output_1ND, feature_1ND[0, :5])
        assert (alike > 0.99).all()
        assert (output_1ND.norm(dim=-1) / feature_1ND[0, :5].norm(dim=-1) - 1).abs().max() < 0.2


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


@pytest.mark.slow
def test_training_goes_on_from_the_published_module(tmp_path: Path) -> None:
    """Bug: a module that was trained with its target is thrown away, and training begins anew."""
    target, made = with_module("qwen3_5", tmp_path)
    target.model.config.name_or_path = str(tmp_path)
    drafter = mtp.Method.init_for_training(target)
    assert all(torch.equal(weight, drafter.net.state_dict()[name]) for name, weight in made.net.state_dict().items())
    loss = drafter.loss(heads.batch_of(target, target.num_layers))
    loss.total.backward()
    assert all(weight.grad is not None for weight in drafter.net.parameters())


@pytest.mark.parametrize("options", [{"ttt.steps": 0}, {"ttt.decay": 0}, {"ttt.decay": 1.5}, {"ttt.decay": True}])
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="ttt"):
        build_options(mtp.Options, options)


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


def test_layers_that_are_not_ours() -> None:
    """Guards modules that our layer would compute otherwise."""
    for family in ("gemma2", "qwen3", "olmo2"):
        assert llama_net(mtp.Method.random(target_of(family)).net) is None, family


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama4", "jamba"])
def test_families_without_modules(family: str) -> None:
    """Bug: a target whose layers transformers makes no module of ends in a traceback."""
    with pytest.raises(ModelError, match=r"transformers makes no MTP module for a .*: choose another method than mtp"):
        mtp.Method.init_for_training(target_of(family))


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_a_module_is_stitched_in_again(family: str, tmp_path: Path) -> None:
    """Bug: into a target that such an export made the first module is written; other tensors are kept."""
    target, _ = with_module(family, tmp_path / "target")
    save_file({"other": torch.ones(2)}, tmp_path / "target" / "mtp.safetensors", {"format": "pt"})
    for seed, source, place in ((6, "target", "first"), (7, "first", "second")):
        head = mtp.Method.random(target, build_options(mtp.Options, TREE), seed=seed)
        known = checkpoints.ExportTarget(str(tmp_path / source))
        exports.export(head.weights(), "checkpoint", tmp_path / place, known)
        stitched = load_net(target, tmp_path / place).state_dict()
        for name, weight in head.net.state_dict().items():
            torch.testing.assert_close(stitched[name], weight)
        index = json.loads((tmp_path / place / "model.safetensors.index.json").read_text())["weight_map"]
        assert index["other"] == "model-mtp.safetensors"


@pytest.mark.slow
def test_a_target_of_the_hub_is_stitched_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the fetched copy of a target has a head's files only, so no engine can read a text with it."""
    target, _ = with_module("qwen3_5", tmp_path / "target")
    other = {"tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "generation_config.json"}
    for name in (*other, "original.pth", "picture.png"):
        (tmp_path / "target" / name).write_text("{}")

    def snapshot(hub_id: str, allow_patterns: list[str], **more: Any) -> str:
        (tmp_path / "fetched").mkdir(exist_ok=True)
        for file in (tmp_path / "target").iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path / "fetched")
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    weights = mtp.Method.random(target, build_options(mtp.Options, TREE), seed=6).weights()
    exports.export(weights, "checkpoint", tmp_path / "out", checkpoints.ExportTarget("someone/target"))
    module = {"config.json", "model-00001-of-00001.safetensors", "mtp.safetensors", "model.safetensors.index.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == module | other


def test_refusals_of_stitching(tmp_path: Path) -> None:
    """Guards one clear line where there is no target, or no engine for the family."""
    target = heads.tiny_target()
    weights = mtp.Method.random(target, build_options(mtp.Options, TREE), seed=6).weights()
    with pytest.raises(CheckpointError, match="checkpoints of a llama have no names"):
        exports.export(weights, "checkpoint", tmp_path / "out", checkpoints.ExportTarget("x"))
    weights.config["target_model_type"] = "glm4_moe"
    with pytest.raises(CheckpointError, match="pass the target's folder"):
        exports.export(weights, "checkpoint", tmp_path / "out", checkpoints.ExportTarget())
