"""mtp: the module in a target's published checkpoint is the one that transformers computes, and drafts by it are verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpModel

import zoo
from eyas.core.drafter import build_options
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.drafters import mtp
from eyas.drafters._mtp_net import LayoutCache, _twin
from eyas.errors import CheckpointError
from reference import plain_decode, run

TREE = {"tree.nodes": 10, "tree.depth": 4, "tree.branch": 3}


def published(module: torch.nn.Module, layers: int | None) -> dict[str, Tensor]:
    """The module's tensors under published names: Qwen3.5's (`layers` None), or DeepSeek-V3's and GLM's, behind that many layers."""
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
        return {f"{stem}.{e}.{k}_proj.weight": w[e].clone() for k, w in (("gate", gate), ("up", up)) for e in range(len(weight))}
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": part.clone() for e, part in enumerate(weight)}
    return {name: weight.clone()}


def glm4_moe() -> PreTrainedModel:
    return zoo.tiny("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1)


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
    """Bugs: a tensor under another name, halves of the projection exchanged, positions or the mask wrong, parts of a text read apart."""
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
            cache.at(range(1), lambda slots_1N=slots_1N: slots_1N, end)
            cache.see(torch.tensor([begin]), torch.ones(1, end - begin, end - begin).tril().bool())
            read = loaded.net.remember if not begin else loaded.net
            got = read(hidden_1ND[:, part], embeddings_1ND[:, part], slots_1N, cache)
            if begin:
                assert torch.allclose(got, expected[:, part], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "glm4_moe"])
def test_lossless(family: str, tmp_path: Path) -> None:
    """Guards sessions on the families that publish modules: text is that of plain decoding, for rows of different ages."""
    target, _ = with_module(family, tmp_path)
    drafter = mtp.Method.from_pretrained(tmp_path, target, build_options(mtp.Options, TREE))
    laws = (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=9, seed=4))
    requests = [Request(tuple(range(5, 5 + n)), 14, law) for n, law in zip((4, 21, 9), laws, strict=True)]
    tokens, _ = run(Decoder(target, drafter, 2), requests)
    assert tokens == [list(plain_decode(target.model, request)) for request in requests]


def test_a_target_without_a_module(tmp_path: Path) -> None:
    """Bug: a module that is not there drafts with random weights, or ends in a traceback."""
    model = zoo.FAMILIES["llama"]()
    with pytest.raises(CheckpointError, match="name the one that has them with --draft"):
        mtp.Method.from_pretrained(None, Target(model))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights of multi-token-prediction modules for a llama"):
        mtp.Method.from_pretrained(tmp_path, Target(model))
