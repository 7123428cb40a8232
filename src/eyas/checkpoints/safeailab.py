"""The format in which the authors of EAGLE publish their heads, for EAGLE-1 and EAGLE-2 (the same weights): names, config, nothing else.

    config.json     a LLaMA config with extra keys `bias` (of fc; true when absent) and `qkv_bias`; its num_hidden_layers is not read
    tensors         the left column of NAMES; layer 0 has no input_layernorm, there is no final norm and no lm_head

Our config, which `read` makes and `write` takes:

    hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, head_dim     int
    rms_eps (1e-6 when absent), rope_theta (10000 when absent)                        float
    rope_scaling       None, or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    max_positions      int, 2048 when absent: how far the head was trained, as far as the config says
    fc_bias, qkv_bias  bool
    act                "silu"
    eyas               only in heads that we wrote: a dict with what the writer recorded (method, version, target fingerprint, training)

Heads of EAGLE-3 in this format are recognised and refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._weights import Shape, differences
from eyas.errors import CheckpointError

__all__ = ["METHODS", "NAMES", "read", "read_config", "recognises", "shapes", "write", "write_config"]

METHODS = ("eagle1",)

NAMES = {
    "embed_tokens.weight": "embed.weight",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "layers.0.self_attn.q_proj.weight": "layer.attention.q.weight",
    "layers.0.self_attn.k_proj.weight": "layer.attention.k.weight",
    "layers.0.self_attn.v_proj.weight": "layer.attention.v.weight",
    "layers.0.self_attn.o_proj.weight": "layer.attention.o.weight",
    "layers.0.self_attn.q_proj.bias": "layer.attention.q.bias",
    "layers.0.self_attn.k_proj.bias": "layer.attention.k.bias",
    "layers.0.self_attn.v_proj.bias": "layer.attention.v.bias",
    "layers.0.mlp.gate_proj.weight": "layer.mlp.gate.weight",
    "layers.0.mlp.up_proj.weight": "layer.mlp.up.weight",
    "layers.0.mlp.down_proj.weight": "layer.mlp.down.weight",
    "layers.0.post_attention_layernorm.weight": "layer.mlp_norm.weight",
}
"""Published tensor name -> ours."""

OPTIONAL = frozenset({"embed.weight"})
"""Ours that a file may lack: the embedding is the target's."""

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these are the tensors of a head in this format, EAGLE-3 included. The config tells nothing: it is a LLaMA's."""
    return _is_eagle3(names) or ("fc.weight" in names and any(name.startswith("layers.") for name in names))


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("eagle1", our config, our tensors); CheckpointError names all that is not as the format says."""
    if _is_eagle3(tensors):
        raise CheckpointError("this is a head of EAGLE-3 (it has midlayer or d2t tensors), a format that this version does not read yet")
    layers = sorted({int(layer[1]) for name in tensors if (layer := re.match(r"layers\.(\d+)\.", name))})
    if layers != [0]:
        raise CheckpointError(f"an EAGLE-1 head has one layer, layers.0; this file has layers {', '.join(map(str, layers))}")
    if "layers.0.input_layernorm.weight" in tensors:
        raise CheckpointError("an EAGLE-1 head has no layers.0.input_layernorm.weight, this file has one: it is another kind of head")
    ours = read_config(config)
    sizes = shapes(ours)
    wanted = {published: sizes[name] for published, name in NAMES.items() if name in sizes}
    found = differences(tensors, wanted, {published for published, name in NAMES.items() if name in OPTIONAL})
    if found:
        raise CheckpointError(f"the tensors are not what config.json says: {found}")
    integer = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if integer:
        raise CheckpointError(f"tensors that are not floating point: {', '.join(integer)}; quantised heads are not read")
    return "eagle1", ours, {NAMES[name]: tensor for name, tensor in tensors.items()}


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our config and tensors -> config.json and tensors as published."""
    assert method in METHODS, method
    found = differences(tensors, shapes(config), OPTIONAL)
    assert not found, found
    published = {name: tensors[ours] for name, ours in NAMES.items() if ours in tensors}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    return {**write_config(config), "torch_dtype": dtype}, published


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Our tensor names and their shapes, from our config."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    out: dict[str, Shape] = {"embed.weight": (config["vocab_size"], hidden), "fc.weight": (hidden, 2 * hidden)}
    if config["fc_bias"]:
        out["fc.bias"] = (hidden,)
    rows = {"q": config["num_heads"] * width, "k": config["num_kv_heads"] * width, "v": config["num_kv_heads"] * width}
    for name, size in rows.items():
        out[f"layer.attention.{name}.weight"] = (size, hidden)
        if config["qkv_bias"]:
            out[f"layer.attention.{name}.bias"] = (size,)
    out["layer.attention.o.weight"] = (hidden, rows["q"])
    out |= {"layer.mlp.gate.weight": (inner, hidden), "layer.mlp.up.weight": (inner, hidden), "layer.mlp.down.weight": (hidden, inner)}
    out["layer.mlp_norm.weight"] = (hidden,)
    return out


# --- config ----------------------------------------------------------------------------------------------------------------------------


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Published config.json -> our config. Raises CheckpointError for a missing or impossible value, another activation or RoPE."""
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json has {heads} attention heads, which is no multiple of its {kv_heads} key-value heads")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"config.json has hidden_size {hidden}, no multiple of its {heads} attention heads, and no head_dim")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError(f"config.json has hidden_act {act!r}; only silu is known in heads of this format")
    theta, scaling = _rope(config)
    ours = {
        "hidden_size": hidden,
        "intermediate_size": _count(config, "intermediate_size"),
        "vocab_size": _count(config, "vocab_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _count(config, "head_dim", hidden // heads),
        "rms_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": _count(config, "max_position_embeddings", _count(config, "max_sequence_length", 2048)),
        "fc_bias": _flag(config, "bias", True),
        "qkv_bias": _flag(config, "qkv_bias", False),
        "act": act,
    }
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our config -> a config.json that the readers of the published format understand; they ignore "eyas"."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": config["act"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"],
        "head_dim": config["head_dim"],
        "rms_norm_eps": config["rms_eps"],
        "rope_theta": config["rope_theta"],
        "rope_scaling": config["rope_scaling"],
        "max_position_embeddings": config["max_positions"],
        "bias": config["fc_bias"],
        "qkv_bias": config["qkv_bias"],
        "tie_word_embeddings": False,
    }
    return {**published, "eyas": config["eyas"]} if "eyas" in config else published


def _is_eagle3(names: Collection[str]) -> bool:
    return "d2t" in names or "t2d" in names or any(name.startswith("midlayer.") for name in names)


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling) from `rope_theta` and `rope_scaling`, or from the `rope_parameters` that newer configs have instead."""
    newer, older = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    theta = _number(config, "rope_theta", _number(newer, "rope_theta", 10000.0))
    given = older or newer
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"config.json has a RoPE of type {kind!r}; known here: default, llama3")
    return theta, {"rope_type": "llama3", **{key: _number(given, key) for key in _LLAMA3}}


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be an object or null")
    return value


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} {value!r}; it must be a whole number above 0")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be a number above 0")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be true or false")
    return value
