"""EAGLE-1 and EAGLE-2 heads (the same weights) as their authors, SafeAILab, publish them.

    config.json     a LLaMA config with extra keys `bias` (of fc; true when absent) and `qkv_bias` (or LLaMA's attention_bias);
                    num_hidden_layers is not read: published heads leave it at the target's
    tensors         the keys of NAMES; layer 0 has no input_layernorm, there is no final norm and no lm_head

Our config, which `read` returns and `write` takes:

    hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, head_dim     int
    rms_eps (1e-6 when absent), rope_theta (10000 when absent)                        float
    rope_scaling       None, or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    max_positions      int, 2048 when absent: the trained length, as far as config.json tells
    fc_bias, qkv_bias  bool
    act                "silu"
    inputs             the net's inputs, one of INPUTS; "shifted", which is EAGLE, unless the "eyas" object says otherwise
    eyas               only in heads written by eyas: the writer's record (method, version, target fingerprint, training)

Heads with other inputs belong to EAGLE-1's ablation (paper, section 4.3.2) and have the same tensors (no fc
with a single input); only eyas reads them right. EAGLE-3 heads are another format, `safeailab3`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._block import is_block_head
from eyas.checkpoints._eagle3 import is_eagle3, sliding_window
from eyas.checkpoints._llama import Shape, flag, layer_names, layer_shapes, mapping, read_layer, read_rope, write_layer
from eyas.checkpoints._weights import Published, differences, refuse_dtypes
from eyas.errors import CheckpointError, near

__all__ = ["INPUTS", "METHODS", "NAMES", "read", "read_config", "recognises", "shapes", "write", "write_config"]

METHODS = ("eagle1",)
JOINED = ("shifted", "unshifted")
INPUTS = (*JOINED, "feature", "token")

NAMES = {
    "embed_tokens.weight": "embed.weight",
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    **layer_names("layers.0", "layer"),
}
"""Published tensor name -> ours."""

OPTIONAL = frozenset({"embed.weight"})
"""Our tensors that a file may lack: the target's embedding is used then."""


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether these are the tensors of a head in this format; config.json only tells that it
    is not an EAGLE-3 head."""
    record = config.get("eyas")
    has_inputs = "fc.weight" in names or (isinstance(record, dict) and "inputs" in record)
    is_other = is_eagle3(config, names) or is_block_head(config, names)
    return not is_other and has_inputs and any(name.startswith("layers.") for name in names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle1", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    layers = sorted({int(layer[1]) for name in tensors if (layer := re.match(r"layers\.(\d+)\.", name))})
    if layers != [0]:
        raise CheckpointError(
            f"an EAGLE-1 head has one layer, layers.0; this file has layers {', '.join(map(str, layers))}"
        )
    if "layers.0.input_layernorm.weight" in tensors:
        raise CheckpointError(
            "an EAGLE-1 head has no layers.0.input_layernorm.weight, this file has one: it is another kind of head"
        )
    ours = read_config(config)
    our_shapes = shapes(ours)
    expected = {name: our_shapes[our_name] for name, our_name in NAMES.items() if our_name in our_shapes}
    faults = differences(tensors, expected, {name for name, our_name in NAMES.items() if our_name in OPTIONAL})
    if faults:
        raise CheckpointError(f"the tensors differ from config.json: {faults}")
    refuse_dtypes(tensors)
    return "eagle1", ours, {NAMES[name]: tensor for name, tensor in tensors.items()}


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors of an EAGLE-1 or EAGLE-2 head in the form of SafeAILab."""
    assert method in METHODS, method
    faults = differences(tensors, shapes(config), OPTIONAL)
    assert not faults, faults
    published = {name: tensors[ours] for name, ours in NAMES.items() if ours in tensors}
    dtype = str(tensors["layer.mlp_norm.weight"].dtype).removeprefix("torch.")
    return {**write_config(config), "torch_dtype": dtype}, published


def shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return our tensor names and their shapes, from our config."""
    hidden = config["hidden_size"]
    out: dict[str, Shape] = {"embed.weight": (config["vocab_size"], hidden)}
    if config["inputs"] in JOINED:
        out["fc.weight"] = (hidden, 2 * hidden)
        if config["fc_bias"]:
            out["fc.bias"] = (hidden,)
    return out | layer_shapes(config, hidden)


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our config of a published config.json. Raise CheckpointError for a missing or impossible value, another
    activation or RoPE."""
    inputs = mapping(config, "eyas").get("inputs", "shifted")
    if inputs not in INPUTS:
        raise CheckpointError(f'config.json has "eyas": "inputs" {inputs!r}; {near(str(inputs), INPUTS)}')
    layer = read_layer(config)
    if window := sliding_window(config, layer["max_positions"], 1):
        raise CheckpointError(
            f"config.json has a sliding window of {window} tokens, which the layer of EAGLE-1 does not have"
        )
    ours = {
        **layer,
        **read_rope(config),
        "fc_bias": flag(config, "bias", True),
        "qkv_bias": flag(config, "qkv_bias", False) or flag(config, "attention_bias", False),
        "inputs": inputs,
    }
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json, for our config, that readers of the published format understand; they ignore "eyas"."""
    published = {**write_layer(config), "bias": config["fc_bias"], "qkv_bias": config["qkv_bias"]}
    record = dict(config.get("eyas") or {})
    if config["inputs"] != "shifted":
        record["inputs"] = config["inputs"]
    return {**published, "eyas": record} if record else published
