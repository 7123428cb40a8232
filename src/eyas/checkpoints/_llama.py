"""Values of a config.json, read strictly: what the formats share, because all of them publish a LLaMA layer.

It knows no tensor name and no format. Every function raises CheckpointError for a value that is missing or impossible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.errors import CheckpointError

__all__ = ["count", "flag", "mapping", "number", "read_layer", "read_scaling", "write_layer"]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes and constants of the layer under our names, without its biases and its RoPE."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json has {heads} attention heads, which is no multiple of its {kv_heads} key-value heads")
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(f"config.json has hidden_size {hidden}, no multiple of its {heads} attention heads, and no head_dim")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError(f"config.json has hidden_act {act!r}; only silu is known in heads of this format")
    return {
        "hidden_size": hidden,
        "intermediate_size": count(config, "intermediate_size"),
        "vocab_size": count(config, "vocab_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": count(config, "head_dim", hidden // heads),
        "rms_eps": number(config, "rms_norm_eps", 1e-6),
        "max_positions": count(config, "max_position_embeddings", count(config, "max_sequence_length", 2048)),
        "act": act,
    }


def read_scaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A `rope_scaling` or `rope_parameters` object -> the scaling of RoPE; None for plain RoPE."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"config.json has a RoPE of type {kind!r}; known here: default, llama3")
    return {"rope_type": "llama3", **{key: number(given, key) for key in _LLAMA3}}


def write_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our config -> the keys of a LLaMA config.json, with the RoPE always said."""
    return {
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
        "tie_word_embeddings": False,
    }


# --- single values ---------------------------------------------------------------------------------------------------------------------


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty when absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be an object or null")
    return value


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} {value!r}; it must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has {key} {value!r}; it must be true or false")
    return value
