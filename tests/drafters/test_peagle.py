"""P-EAGLE, and EAGLE-3's net with several layers: transformers' layers, training against drafting, a short training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import heads
from eyas import checkpoints, drafters
from eyas.core.engine import Decoder, Request
from eyas.core.options import build_options
from eyas.core.target import Target
from eyas.errors import CheckpointError
from eyas.nn import Documents
from eyas_train.own_outputs import in_parallel

SMALL = {"head.layers": "0,1,3", "head.depth": 3}


def made(name: str, target: Target, kind: str = "random", **options: Any) -> Any:
    return heads.make(name, target, kind, **{**SMALL, **options})


def by_transformers(drafter: Any, hidden_ND: Tensor, embeddings_ND: Tensor) -> Tensor:
    """The net's output [N, D] at N inputs in causal order, by transformers' LLaMA layers. The first one is changed as
    speculators does: its projections read normed embedding and hidden, its residual is the hidden."""
    net, shape = drafter.net, drafter.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, rms_norm_eps=shape.rms_eps, num_hidden_layers=3,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, attn_implementation="eager",
    )  # fmt: skip
    N, layers = len(hidden_ND), [net.layer, *net.later]
    cos_sin = LlamaRotaryEmbedding(config)(hidden_ND, torch.arange(N)[None])
    mask_11NN = torch.full((N, N), -torch.inf).triu(1)[None, None]
    x_1ND = hidden_ND[None]
    for number, ours in enumerate(layers):
        theirs = LlamaDecoderLayer(config, number)
        weights = {f"self_attn.{x}_proj.weight": getattr(ours.attention, x).weight for x in "qkvo"}
        weights |= {f"mlp.{x}_proj.weight": getattr(ours.mlp, x).weight for x in ("gate", "up", "down")}
        weights |= {"post_attention_layernorm.weight": ours.mlp_norm.weight}
        given = {"attention_mask": mask_11NN, "position_embeddings": cos_sin}
        if number:
            theirs.load_state_dict(weights | {"input_layernorm.weight": ours.input_norm.weight})
            x_1ND = theirs(x_1ND, **given)
            continue
        for x in "qkv":
            getattr(theirs.self_attn, f"{x}_proj").weight = torch.nn.Parameter(
                weights.pop(f"self_attn.{x}_proj.weight")
            )
        theirs.load_state_dict(weights, strict=False)
        joined = torch.cat([ours.embed_norm(embeddings_ND), ours.hidden_norm(hidden_ND)], dim=-1)[None]
        after = x_1ND + theirs.self_attn(hidden_states=joined, **given)[0]
        x_1ND = after + theirs.mlp(theirs.post_attention_layernorm(after))
    return x_1ND[0]


@torch.no_grad()
def test_masks_behind_every_slot(target: Target) -> None:
    """Guards training's layers, positions, masks: a slot's pairs and the masks behind it are one causal text."""
    drafter, levels = made("peagle", target, **{"head.mask_token": 7}), 4
    ids_N = torch.randint(target.vocab_size, (11,), generator=torch.Generator().manual_seed(1))
    lengths, rows_M = (7, 4), torch.tensor([0, 2, 5, 8])
    features_NF = torch.cat([target.encode(part[None], drafter.feature_layers)[0] for part in ids_N.split(lengths)])
    mask_D = drafter.embed(torch.tensor([7]))[0]
    embed = lambda index: drafter.embed(ids_N[index])  # noqa: E731
    found = in_parallel(drafter.net, features_NF, embed, mask_D, rows_M, Documents(lengths), levels)
    fused_ND, mask_hidden_D = drafter.net.fuse(features_NF), drafter.net.fuse(drafter.net.mask_hidden)
    for m, row in enumerate(rows_M.tolist()):
        begin = 0 if row < 7 else 7
        hidden = torch.cat([fused_ND[begin : row + 1], mask_hidden_D.expand(levels - 1, -1)])
        embeddings = torch.cat([embed(torch.arange(begin, row + 1) + 1), mask_D.expand(levels - 1, -1)])
        expected = by_transformers(drafter, hidden, embeddings)[row - begin :]
        torch.testing.assert_close(torch.stack([hidden_MD[m] for hidden_MD in found]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "peagle"])
@pytest.mark.parametrize("cycles", [1, 4])
@torch.no_grad()
def test_drafting_sees_the_whole_text(name: str, cycles: int, target: Target) -> None:
    """Guards chunks, commits and layers' caches: outputs at the newest pair and masks are those over the text."""
    drafter = made(name, target, **{"tree.depth": 4, "tree.nodes": 9, "tree.branch": 2})
    outputs: list[Tensor] = []
    drafter.net.register_forward_hook(lambda module, args, out: outputs.append(out[0]))
    decoder, text = Decoder(target, drafter), list(range(3, 40))
    decoder.add(Request(tuple(text), 30))
    for _ in range(cycles):
        outputs.clear()
        before = list(text)
        for step in decoder.step():
            text += step.tokens
            before += step.tokens if step.prefill else ()
    ids_T = torch.tensor(before)
    fused_ND = drafter.net.fuse(target.encode(ids_T[None], drafter.feature_layers)[0][:-1])
    embeddings_ND = drafter.embed(ids_T[1:])
    masks = 3 if name == "peagle" else 0
    if masks:
        mask_D = drafter.embed(torch.tensor([drafter.mask_token]))[0]
        fused_ND = torch.cat([fused_ND, drafter.net.fuse(drafter.net.mask_hidden).expand(masks, -1)])
        embeddings_ND = torch.cat([embeddings_ND, mask_D.expand(masks, -1)])
    expected = by_transformers(drafter, fused_ND, embeddings_ND)[-1 - masks :]
    assert len(outputs) == (1 if masks else 4), "P-EAGLE runs its net once in a cycle, EAGLE-3 once for each level"
    # one pair is pending: the random head accepts nothing
    found = torch.cat([outputs[0][:1], outputs[0][len(outputs[0]) - masks :]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_heads_of_others(target: Target, tmp_path: Path) -> None:
    """Guards against a mask token that the target does not have, and a head of another method."""
    weights = made("peagle", target).weights()
    weights.config["mask_token"] = 160
    with pytest.raises(CheckpointError, match="mask token 160; there are 160 embeddings"):
        drafters.find("peagle").load(weights, target)
    with pytest.raises(CheckpointError, match="holds a head of eagle3, not of P-EAGLE"):
        drafters.find("peagle").load(made("eagle3", target).weights(), target)


@pytest.mark.cover(name=1)
@pytest.mark.parametrize("name", ["eagle3", "peagle"])
def test_trained_a_little(name: str, target: Target, tmp_path: Path) -> None:
    """Guards the way through the trainer: the held-out loss falls, drafts are accepted, the head is read back."""
    kind: Any = drafters.find(name)
    steps = {"head.levels": 3} if name == "peagle" else {"ttt.steps": 3}
    options = build_options(kind.Options, {**SMALL, "head.depth": 2, **steps})
    drafter = kind.init_for_training(target, options, 1)
    first, losses, figures = heads.short_training(drafter, tmp_path, steps=100)
    assert losses[-1]["loss"] < min(losses[0]["loss"], 0.9 * first)
    assert {"0-alpha", "chain tau", "tau"} <= figures.keys()
    again: Any = kind.load(checkpoints.load(tmp_path), target, options)
    assert again.layers == 2
    assert all(torch.equal(value, again.net.state_dict()[key]) for key, value in drafter.net.state_dict().items())
    if name == "peagle":
        assert (again.mask_token, again.levels) == (drafter.mask_token, 3)
