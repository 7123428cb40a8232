"""DFlash and DSpark heads on disk: the published names are written out here; which token a slot
predicts; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas import drafters
from eyas.checkpoints import load, save
from eyas.core.target import Target
from eyas.errors import CheckpointError

D, INNER, V, R, H = 48, 80, 160, 6, 12  # sizes of zoo's llama; r of the Markov head; width of an attention head
DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"


def tensors(markov: bool = False, confidence: bool = False, tables: bool = False) -> dict[str, Tensor]:
    """A head of two layers that reads two features, under the published names."""
    made = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    layer |= {"self_attn.q_norm": (H,), "self_attn.k_norm": (H,), "self_attn.o_proj": (D, 48)}
    layer |= {"self_attn.q_proj": (48, D), "self_attn.k_proj": (24, D), "self_attn.v_proj": (24, D)}
    layer |= {"mlp.gate_proj": (INNER, D), "mlp.up_proj": (INNER, D), "mlp.down_proj": (D, INNER)}
    for i in range(2):
        sizes |= {f"layers.{i}.{name}.weight": size for name, size in layer.items()}
    if markov:
        sizes |= {"markov_head.markov_w1.weight": (V, R), "markov_head.markov_w2.weight": (V, R)}
    if confidence:
        sizes |= {"confidence_head.proj.weight": (1, D + R), "confidence_head.proj.bias": (1,)}
    if tables:
        sizes |= {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    return {name: torch.randn(size, generator=made) for name, size in sizes.items()}


def config(name: str, **more: Any) -> dict[str, Any]:
    """A config.json as z-lab or DeepSpec write it."""
    layer = {
        "architectures": [name], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "hidden_size": D,
        "intermediate_size": INNER, "vocab_size": V, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": H, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False, "num_target_layers": 4,
        "block_size": 5, "tie_word_embeddings": False,
    }  # fmt: skip
    ids: dict[str, Any] = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    if name == DFLASH:
        return {**layer, "dflash_config": ids, **more}
    markov = {"markov_rank": R, "markov_head_type": "vanilla"}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return {**layer, **ids, **markov, **confidence, "num_anchors": 512, **more}


def inner(**more: Any) -> dict[str, Any]:
    """A head of DFlash with more settings of its own."""
    return config(DFLASH, dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 1], **more})


def lay(folder: Path, told: dict[str, Any], held: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    save_file(held, folder / "model.safetensors")
    return folder


def published(name: str) -> dict[str, Tensor]:
    return tensors() if name == DFLASH else tensors(markov=True, confidence=True, tables=True)


@pytest.mark.parametrize(("name", "method", "from_anchor"), [(DFLASH, "dflash", False), (DSPARK, "dspark", True)])
def test_reading_the_published_names(tmp_path: Path, target: Target, name: str, method: str, from_anchor: bool) -> None:
    """Guards the map of names, the layers (published: outputs) and the slots: DFlash's predict
    their own place, DSpark's the next one."""
    held = published(name)
    weights = load(lay(tmp_path, config(name), held))
    assert weights.method == method
    assert weights.config["feature_layers"] == (1, 2)
    assert (weights.config["block"], weights.config["mask_token"], weights.config["from_anchor"]) == (5, 7, from_anchor)
    pairs = {
        "layers.1.self_attn.q_norm.weight": "layers.1.attention.q_norm.weight",
        "layers.0.input_layernorm.weight": "layers.0.input_norm.weight",
        "layers.0.post_attention_layernorm.weight": "layers.0.mlp_norm.weight",
        "layers.1.mlp.down_proj.weight": "layers.1.mlp.down.weight",
        "hidden_norm.weight": "hidden_norm.weight",
    }
    if name == DSPARK:
        pairs |= {
            f"markov_head.markov_{x}.weight": f"markov.{y}.weight" for x, y in (("w1", "before"), ("w2", "after"))
        }
        pairs |= {"confidence_head.proj.bias": "confidence.bias", "lm_head.weight": "head.weight"}
        pairs |= {"embed_tokens.weight": "embed.weight"}
    assert all(torch.equal(held[theirs], weights.tensors[ours]) for theirs, ours in pairs.items())
    assert len(weights.tensors) == len(held)
    drafter: Any = drafters.find(method).load(weights, target)
    assert drafter.block_format.levels == (5 if from_anchor else 4)
    assert drafter.feature_layers == (1, 2)
    assert (drafter.net.head is not None) == (name == DSPARK)


@pytest.mark.parametrize("name", [DFLASH, DSPARK])
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """Guards the writer: what is read from what it wrote is the same, under the published names,
    and says which token a slot predicts."""
    first = load(lay(tmp_path / "a", config(name, eyas={"target_fingerprint": "0a1:0.5"}), published(name)))
    save(first, tmp_path / "b")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == published(name).keys()
    second = load(tmp_path / "b")
    assert second.config == first.config
    assert all(torch.equal(value, second.tensors[key]) for key, value in first.tensors.items())
    told = json.loads((tmp_path / "b" / "config.json").read_text())
    assert told["architectures"] == [name]
    assert told["sample_from_anchor"] == (name == DSPARK)


@pytest.mark.parametrize(("told", "from_anchor"), [
    (config(DFLASH, sample_from_anchor=True), True),
    (config(DFLASH, shift_label=True), True),
    (config(DSPARK, sample_from_anchor=False), False),
    (config("DSparkDraftModel", sample_from_anchor=True), True),
    (config("DSparkDraftModel", shift_label=False), False),
])  # fmt: skip
def test_the_flag_has_precedence(tmp_path: Path, told: dict[str, Any], from_anchor: bool) -> None:
    """Guards the off-by-one: what config.json says is stronger than the class."""
    held = tensors() if told["architectures"] == [DFLASH] else tensors(markov=True, confidence=True)
    assert load(lay(tmp_path, told, held)).config["from_anchor"] == from_anchor


@pytest.mark.parametrize(("told", "message"), [
    (config("DSparkDraftModel"), "which token a slot"),
    ({**config(DSPARK), "architectures": None}, "which token a slot"),
    (config(DSPARK, sample_from_anchor=True, shift_label=False), "contradict"),
    (config(DSPARK, markov_head_type="gated"), "'gated'"),
    (config("Gemma4DSparkModel"), "Gemma 4's"),
    (config(DSPARK, layer_types=["full_attention", "chunked_attention"]), "layer_types"),
    (config(DSPARK, draft_vocab_size=32), "whole vocabulary"),
    (config(DSPARK, attention_bias=True), "biases"),
    (config(DSPARK, model_type="llama"), "qwen3"),
    (config(DSPARK, target_layer_ids=[1, 0]), "target_layer_ids"),
    (config(DSPARK, mask_token_id=None), "mask_token_id"),
    ({**config(DFLASH), "architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    (config(DFLASH, use_swa=True), "sliding window"),
    (config(DFLASH, attention_value_scale=0.7), "multiplied by a factor"),
    (config(DFLASH, attention_sink_bias=True), "sinks"),
    (inner(projector_type="domino"), "domino"),
    (inner(selector_rank=64), "each pair is there"),
    (inner(input_embedding_scale=-2.0), "above 0"),
])  # fmt: skip
def test_refusals(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    plain = "dflash_config" in told
    with pytest.raises(CheckpointError, match=message):
        load(lay(tmp_path, told, tensors() if plain else tensors(markov=True, confidence=True)))


def test_neighbouring_channels_are_put_in_halves(tmp_path: Path, target: Target) -> None:
    """Guards heads for LFM2.5, whose RoPE turns neighbouring channels: a query and a key of theirs have the same product
    as ours, at any distance; the class alone says which token a slot predicts."""
    name, held = "Lfm2DSparkDraftModel", tensors(markov=True, confidence=True)
    told = config(DSPARK, rope_is_neox_style=False) | {"architectures": [name]}
    drafter: Any = drafters.find("dspark").load(load(lay(tmp_path, told, held)), target)
    assert drafter.block_format.from_anchor
    attention = drafter.net.layers[1].attention
    x_1ND, position_1N = torch.randn(1, 3, D, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 5, 9]])
    query, (key, _) = attention.query(x_1ND, position_1N), attention.rotated_key_value(x_1ND, position_1N)
    theirs = []
    for part, heads in (("q", 4), ("k", 2)):
        y = (x_1ND @ held[f"layers.1.self_attn.{part}_proj.weight"].T).view(1, 3, heads, H)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * held[f"layers.1.self_attn.{part}_norm.weight"]
        angle = position_1N[..., None, None] * 10000.0 ** -(torch.arange(0, H, 2) / H)
        even, odd = y[..., ::2], y[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
        theirs.append(torch.stack(turned, dim=-1).flatten(-2))
    for head in range(4):
        ours = query[0, :, head] @ key[0, :, head // 2].T
        torch.testing.assert_close(ours, theirs[0][0, :, head] @ theirs[1][0, :, head // 2].T, rtol=1e-4, atol=1e-4)


def second(**more: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head of DFlash 2, as z-lab publishes it."""
    held = tensors()
    for i in range(2):
        for part in ("attention", "mlp"):
            held[f"layers.{i}.{part}_conv.base_kernel"] = torch.randn(2, 3, D)
            held[f"layers.{i}.{part}_conv.kernel_projection.weight"] = torch.randn(2 * 3 * D // 8, D)
    held |= {f"candidate_selector.{name}_codebook": torch.randn(V, R) for name in ("predecessor", "successor")}
    held["candidate_selector.hidden_projection.weight"] = torch.randn(R, D)
    parts = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": R, "selector_top_k": 5}
    told = config(DFLASH) | {"architectures": ["DFlash2DraftModel"]}
    told["dflash_config"] = {**told["dflash_config"], **parts, **more}
    return told, held


def test_dflash_2_there_and_back(tmp_path: Path, target: Target) -> None:
    """Guards its names, also those by which transformers saves its tables, and what the writer says."""
    told, held = second()
    first = load(lay(tmp_path / "a", told, held))
    assert first.method == "dflash2"
    save(first, tmp_path / "b")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == held.keys()
    again = {f"{name}.weight" if name.endswith("_codebook") else name: value for name, value in held.items()}
    for other in (load(tmp_path / "b"), load(lay(tmp_path / "c", told, again))):
        assert other.config == first.config
        assert all(torch.equal(value, other.tensors[key]) for key, value in first.tensors.items())
    assert drafters.find("dflash2").load(first, target)
    with pytest.raises(CheckpointError, match="not the convolutions"):
        load(lay(tmp_path / "d", {**told, "dflash_config": config(DFLASH)["dflash_config"]}, tensors()))
    with pytest.raises(CheckpointError, match="does not divide"):
        load(lay(tmp_path / "e", second(conv_group_size=7)[0], held))


WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 9}


def test_windows_and_factors(tmp_path: Path) -> None:
    """Guards what z-lab's class makes of layers with a window: their slots see earlier slots only, unless is_causal says
    so for all, or vLLM's setting of that meaning where is_causal is absent; and that the writer says it again."""
    factors = {"input_embedding_scale": 7.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    of_vllm = {"dflash_config": inner(causal=True)["dflash_config"]}
    rules = (({}, (False, True)), ({"is_causal": False}, ()), ({"is_causal": True}, (True, True)))
    for number, (more, causal) in enumerate((*rules, (of_vllm, (True, True)), ({**of_vllm, "is_causal": False}, ()))):
        first = load(lay(tmp_path / f"a{number}", config(DFLASH, **WINDOWED, **factors, **more), tensors()))
        assert first.config["windows"] == (None, 9)
        assert first.config["causal"] == causal
        assert [first.config[key] for key in ("embed_scale", "logit_scale", "logit_cap")] == [7.0, 0.5, 30.0]
        save(first, tmp_path / f"b{number}")
        assert load(tmp_path / f"b{number}").config == first.config
    # where config.json lists the layers of the model that the head was made from, the head's are the first
    told = config(DFLASH, **{**WINDOWED, "layer_types": [*WINDOWED["layer_types"], "full_attention"]})
    assert load(lay(tmp_path, told, tensors())).config["windows"] == (None, 9)


def library(kind: str, **more: Any) -> dict[str, Any]:
    """A config.json of the speculators library."""
    apart = ("dflash_config", "block_size", "num_target_layers")
    layer = {key: value for key, value in config(DFLASH).items() if key not in apart}
    return {
        "speculators_model_type": kind, "transformer_layer_config": layer, "draft_vocab_size": V, "block_size": 5, "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [1, 2], **more,
    }  # fmt: skip


def test_heads_of_the_speculators_library(tmp_path: Path, target: Target) -> None:
    """Guards its rules: ids of inputs, slots that begin after the anchor in DFlash and at it in DSpark, windows, a draft
    vocabulary, copies of the target's tensors."""
    held = {**tensors(), "verifier_norm.weight": torch.ones(D), "embed_tokens.weight": target.embed(torch.arange(V))}
    plain = load(lay(tmp_path / "plain", library("dflash"), held))
    assert (plain.method, plain.config["feature_layers"], plain.config["from_anchor"]) == ("dflash", (1, 2), False)
    windowed = library("dflash")
    windowed["transformer_layer_config"] |= WINDOWED
    read = load(lay(tmp_path / "windows", windowed, held)).config
    assert (read["windows"], read["causal"], read["anchored"]) == ((None, 9), (False, True), True)
    small, ids = tensors(markov=True, confidence=True), torch.arange(0, 150, 3)
    marks = torch.zeros(V, dtype=torch.bool)
    marks[ids] = True
    small |= {"markov_head.markov_w2.weight": torch.randn(50, R), "lm_head.weight": torch.randn(50, D)}
    small |= {"d2t": ids - torch.arange(50), "t2d": marks}
    spark = load(lay(tmp_path / "spark", library("dspark", draft_vocab_size=50, markov_rank=R), small))
    assert spark.config["from_anchor"]
    drafter: Any = drafters.find("dspark").load(spark, target)
    assert drafter.draft_ids_v.tolist() == ids.tolist()


@pytest.mark.parametrize(("told", "message"), [
    (library("xpress"), "'xpress'"),
    (library("dspark", markov_head_type="rnn"), "'rnn'"),
    (library("dflash", aux_hidden_state_layer_ids=[2, 1]), "aux_hidden_state_layer_ids"),
    (library("dflash", transformer_layer_config={"model_type": "gemma3_text"}), "'gemma3_text'"),
    (library("dflash", transformer_layer_config=None), "no transformer_layer_config"),
    (library("dflash", draft_vocab_size=50), "one is missing"),
    (library("dflash", draft_vocab_size=None), "no draft_vocab_size"),
])  # fmt: skip
def test_refusals_of_the_speculators_library(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(lay(tmp_path, told, tensors()))
    assert "\n" not in str(caught.value)
