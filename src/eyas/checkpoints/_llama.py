"""The parts of a published head that all formats share, because all of them publish LLaMA layers.

Values of a config.json are read strictly: a missing or impossible one is a CheckpointError. This
module knows the tensor names of one decoder layer and no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor

from eyas.checkpoints._files import mapping, short
from eyas.checkpoints._weights import Shape
from eyas.core.params import is_number, is_whole
from eyas.errors import CheckpointError

__all__ = [
    "Shape", "are_rising", "count", "flag", "halves", "in_halves", "layer_names", "layer_shapes", "mapping", "number", "read_layer",
    "read_rope", "text", "write_layer",
]  # fmt: skip

# of other families
EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon", "rms_eps")
# tensors of queries and keys, whose rows are channels of heads
_TURNED = frozenset({"q.weight", "k.weight", "q.bias", "k.bias", "q_norm.weight", "k_norm.weight"})
# kinds of RoPE, with the numbers that they must and may have
_SCALINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}


def layer_names(published: str, ours: str) -> dict[str, str]:
    """Return our name of each published tensor, for a layer with these prefixes; without its input norms."""
    names = {f"self_attn.{x}_proj.{kind}": f"attention.{x}.{kind}" for x in "qkv" for kind in ("weight", "bias")}
    names |= {f"self_attn.{x}_norm.weight": f"attention.{x}_norm.weight" for x in "qk"}
    names |= {
        "self_attn.o_proj.weight": "attention.o.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "mlp.gate_proj.weight": "mlp.gate.weight",
        "mlp.up_proj.weight": "mlp.up.weight",
        "mlp.down_proj.weight": "mlp.down.weight",
    }
    return {f"{published}.{theirs}": f"{ours}.{name}" for theirs, name in names.items()}


def layer_shapes(config: Mapping[str, Any], inputs: int, layer: str = "layer") -> dict[str, Shape]:
    """Return our names ("layer.attention.q.weight") and shapes of a layer whose attention reads `inputs` features."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[heads] * config["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    out: dict[str, Shape] = {}
    for name, rows in (("q", query), ("k", key), ("v", key)):
        out[f"{layer}.attention.{name}.weight"] = (rows, inputs)
        if config["qkv_bias"]:
            out[f"{layer}.attention.{name}.bias"] = (rows,)
    if config.get("qk_norm"):
        out |= {f"{layer}.attention.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
    return out | {
        f"{layer}.attention.o.weight": (hidden, query),
        f"{layer}.mlp_norm.weight": (hidden,),
        f"{layer}.mlp.gate.weight": (inner, hidden),
        f"{layer}.mlp.up.weight": (inner, hidden),
        f"{layer}.mlp.down.weight": (hidden, inner),
    }


def read_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer's sizes and constants under our names, without its biases and its RoPE."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json has {heads} attention heads, which is not a multiple of its {kv_heads} key-value heads"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"config.json has no head_dim, and hidden_size {hidden}, which is not a multiple of its {heads} attention heads"
        )
    head_dim = count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json has heads of width {head_dim}; RoPE needs an even one")
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise CheckpointError(f"config.json has hidden_act {short(act)}; only silu is known in heads of this format")
    if flag(config, "mlp_bias", False):
        raise CheckpointError("config.json has mlp_bias true; the MLPs in heads of this format have no biases")
    eps = number(config, "rms_norm_eps", 1e-6)
    for name in EPSILONS:
        if number(config, name, eps) != eps:
            raise CheckpointError(
                f"config.json has {name} {config[name]}, but the norms' epsilon is rms_norm_eps, which is {eps}"
            )
    return {
        "hidden_size": hidden,
        "intermediate_size": count(config, "intermediate_size"),
        "vocab_size": count(config, "vocab_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_eps": eps,
        "max_positions": count(config, "max_position_embeddings", count(config, "max_sequence_length", 2048)),
        "act": act,
    }


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    objects = [rope for key in ("rope_scaling", "rope_parameters") if (rope := mapping(config, key))]
    thetas = {number(rope, "rope_theta") for rope in (config, *objects) if rope.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise CheckpointError(
            f"config.json has more than one rope_theta, {' and '.join(map(str, sorted(thetas)))}: remove the wrong one"
        )
    positions = config.get("max_position_embeddings")
    scalings = [_read_scaling(rope, positions) for rope in objects]
    if any(scaling != scalings[0] for scaling in scalings):
        raise CheckpointError(
            "config.json has a rope_scaling and rope_parameters that contradict each other: remove the wrong one"
        )
    return {"rope_theta": thetas.pop() if thetas else 10000.0, "rope_scaling": scalings[0] if scalings else None}


def _read_scaling(rope: Mapping[str, Any], positions: Any) -> dict[str, Any] | None:
    """Return the scaling that a `rope_scaling` or `rope_parameters` object names; None for plain RoPE."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(["default", *_SCALINGS])
        raise CheckpointError(f"config.json has a RoPE of type {short(kind)}; known here: {known}")
    needed, optional = _SCALINGS[kind]
    if kind == "yarn" and rope.get("original_max_position_embeddings") is None and positions is not None:
        rope = {**rope, "original_max_position_embeddings": positions}
    numbers = {key: number(rope, key) for key in (*needed, *(key for key in optional if rope.get(key) is not None))}
    truncates = {"truncate": flag(rope, "truncate", True)} if kind == "yarn" and "truncate" in rope else {}
    return {"rope_type": kind, **numbers, **truncates}


def in_halves(tensors: Mapping[str, Tensor], config: Mapping[str, Any], head_dim: int) -> dict[str, Tensor]:
    """Return our tensors; of a head whose RoPE turns neighbouring channels ("rope_is_neox_style": false), queries and keys
    have their channels reordered, which leaves their products as they are."""
    if flag(config, "rope_is_neox_style", True) and not flag(config, "rope_interleave", False):
        return dict(tensors)
    return {
        name: halves(tensor, head_dim) if name.rpartition("attention.")[2] in _TURNED else tensor
        for name, tensor in tensors.items()
    }


def halves(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows of queries or keys for a RoPE that turns the two halves of a head, made of those for neighbours."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def write_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a LLaMA config.json for our config; the RoPE is always written."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": config["act"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "num_hidden_layers": config.get("layers", 1),
        "num_attention_heads": config["num_heads"],
        "num_key_value_heads": config["num_kv_heads"],
        "head_dim": config["head_dim"],
        "rms_norm_eps": config["rms_eps"],
        "rope_theta": config["rope_theta"],
        "rope_scaling": config["rope_scaling"],
        "max_position_embeddings": config["max_positions"],
        "tie_word_embeddings": False,
    }


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the value of this key, a whole number from 1 to 2^31; `default` when it is absent or null."""
    value = _present(config, key, default)
    if not is_whole(value) or not 1 <= value <= 2**31:
        raise CheckpointError(f"config.json has {key} {short(value)}; it must be a whole number above 0")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return the value of this key, a number above 0 that float32 holds; `default` when it is absent or null."""
    value = _present(config, key, default)
    if not is_number(value) or not 1e-30 < value < 1e30:
        raise CheckpointError(f"config.json has {key} {short(value)}; it must be a number above 0")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _present(config, key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has {key} {short(value)}; it must be true or false")
    return value


def are_rising(ids: Any, least: int) -> TypeGuard[list[int]]:
    """Return whether this is a list of whole numbers, `least` or more, each above its predecessor."""
    are_ids = isinstance(ids, list) and all(is_whole(i) and i >= least for i in ids)
    return are_ids and bool(ids) and ids == sorted(set(ids))


def text(config: Mapping[str, Any], key: str) -> str:
    """Return the string under this key; an empty one when it is absent or null."""
    value = config.get(key) or ""
    if not isinstance(value, str):
        raise CheckpointError(f"config.json has {key} {short(value)}; it must be a string")
    return value


def _present(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key}")
    return value
