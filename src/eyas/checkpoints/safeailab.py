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
    inputs             what the net reads, one of INPUTS; "shifted", which is EAGLE, when config.json's "eyas" object does not say
    eyas               only in heads that we wrote: a dict with what the writer recorded (method, version, target fingerprint, training)

Heads with other inputs are those of EAGLE-1's ablation, in the same tensors (no fc where one thing is read); nobody else reads them right.
Heads of EAGLE-3 are another format, `safeailab3`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import is_eagle3
from eyas.checkpoints._llama import flag, mapping, number, read_layer, read_scaling, write_layer
from eyas.checkpoints._weights import Shape, differences
from eyas.errors import CheckpointError, near

__all__ = ["INPUTS", "METHODS", "NAMES", "read", "read_config", "recognises", "shapes", "write", "write_config"]

METHODS = ("eagle1",)
JOINED = ("shifted", "unshifted")
INPUTS = (*JOINED, "feature", "token")

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


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these are the tensors of a head in this format. The config tells nothing more than that it is no EAGLE-3 head."""
    ours = config.get("eyas")
    joined = "fc.weight" in names or (isinstance(ours, dict) and "inputs" in ours)
    return not is_eagle3(config, names) and joined and any(name.startswith("layers.") for name in names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("eagle1", our config, our tensors); CheckpointError names all that is not as the format says."""
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
    dtype = str(tensors["layer.mlp_norm.weight"].dtype).removeprefix("torch.")
    return {**write_config(config), "torch_dtype": dtype}, published


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Our tensor names and their shapes, from our config."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    out: dict[str, Shape] = {"embed.weight": (config["vocab_size"], hidden)}
    if config["inputs"] in JOINED:
        out |= {"fc.weight": (hidden, 2 * hidden), **({"fc.bias": (hidden,)} if config["fc_bias"] else {})}
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
    newer, older = mapping(config, "rope_parameters"), mapping(config, "rope_scaling")
    inputs = mapping(config, "eyas").get("inputs", "shifted")
    if inputs not in INPUTS:
        raise CheckpointError(f'config.json has "eyas": "inputs" {inputs!r}; {near(str(inputs), INPUTS)}')
    ours = {
        **read_layer(config),
        "rope_theta": number(config, "rope_theta", number(newer, "rope_theta", 10000.0)),
        "rope_scaling": read_scaling(older or newer),
        "fc_bias": flag(config, "bias", True),
        "qkv_bias": flag(config, "qkv_bias", False),
        "inputs": inputs,
    }
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our config -> a config.json that the readers of the published format understand; they ignore "eyas"."""
    published = {**write_layer(config), "bias": config["fc_bias"], "qkv_bias": config["qkv_bias"]}
    own = {**(config.get("eyas") or {}), **({"inputs": config["inputs"]} if config["inputs"] != "shifted" else {})}
    return {**published, "eyas": own} if own else published
