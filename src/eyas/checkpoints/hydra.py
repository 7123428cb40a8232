"""The format in which the authors of Hydra publish their heads.

    config.json     hydra_num_heads, hydra_num_layers (residual blocks of a head), hydra_head_arch, grounded_heads, hidden_state_offset (0
                    when absent), base_model_name_or_path
    file            hydra_lm_head.pt; what we write is a safetensors file with the same names
    tensors         hydra_mlp.{head}.{place}.linear.weight [D, (head + 2) D] and .bias, hydra_mlp.{head}.{place}.res_connection.weight and
                    .bias of a head's first block; linear [D, D] alone of the others; hydra_lm_head.{head}.weight [V, D] and .bias

Two architectures are read. "mlp" is Hydra: block j stands at place j. "prefix-mlp" is Hydra++: dropout stands between the blocks while it
is trained, so block j is at place 2j + 1 and the lm_heads are hydra_lm_head.{head}.1; and a decoder layer of the base model's shape comes
first, prefix_embeding_layer.layers.0 (the authors' spelling) and prefix_embeding_layer.norm. Its sizes stand nowhere: they are those of
the base model, so only a target can tell them. Two tables may lie beside it: input_embed_fn.weight, the base model's embeddings, and
prefix_embeding_layer.embed_tokens.weight, which nothing reads and which is left out here.

Refused: other architectures (cross-attn, eagle-attn), heads that see no tokens (grounded_heads false: those are Medusa's), features of
another layer than the last (hidden_state_offset).

Our config, which `read` makes and `write` takes:

    heads, blocks, hidden_size, vocab_size     int
    arch           "mlp" or "prefix-mlp"
    layer          of prefix-mlp in heads that we wrote: the shape of the layer; None: the base model's own
    base_model     str, "" when absent: the target's name where the head was made; not checked
    eyas           only in heads that we wrote: a dict with what the writer recorded
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._llama import count, flag, mapping
from eyas.checkpoints._weights import differences
from eyas.errors import CheckpointError, near

__all__ = ["METHODS", "read", "recognises", "write"]

METHODS = ("hydra",)
ARCHES = ("mlp", "prefix-mlp")

_SHAPE = {
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_eps", "rope_theta", "rope_scaling", "qkv_bias",
}  # fmt: skip
_PREFIX = "prefix_embeding_layer."
_UNREAD = f"{_PREFIX}embed_tokens.weight"
_LAYER = {
    "layers.0.input_layernorm.weight": "prefix.input_norm.weight",
    "layers.0.self_attn.q_proj.weight": "prefix.attention.q.weight",
    "layers.0.self_attn.k_proj.weight": "prefix.attention.k.weight",
    "layers.0.self_attn.v_proj.weight": "prefix.attention.v.weight",
    "layers.0.self_attn.o_proj.weight": "prefix.attention.o.weight",
    "layers.0.post_attention_layernorm.weight": "prefix.mlp_norm.weight",
    "layers.0.mlp.gate_proj.weight": "prefix.mlp.gate.weight",
    "layers.0.mlp.up_proj.weight": "prefix.mlp.up.weight",
    "layers.0.mlp.down_proj.weight": "prefix.mlp.down.weight",
    "norm.weight": "prefix.norm.weight",
}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether config.json counts Hydra heads."""
    return "hydra_num_heads" in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("hydra", our config, our tensors); CheckpointError names all that is not as the format says."""
    ours = _read_config(config, tensors)
    names = _names(ours)
    given = {name: tensor for name, tensor in tensors.items() if name != _UNREAD}
    absent = [published for published, name in names.items() if published not in given and name != "embed.weight"]
    extra = [f"{name} {list(tensor.shape)}" for name, tensor in given.items() if name not in names]
    if absent or extra:
        said = [f"missing {', '.join(absent)}"] * bool(absent) + [f"unexpected {', '.join(extra)}"] * bool(extra)
        raise CheckpointError(f"the tensors are not what config.json says: {'; '.join(said)}")
    integer = [f"{name} ({tensor.dtype})" for name, tensor in given.items() if not tensor.is_floating_point()]
    if integer:
        raise CheckpointError(f"tensors that are not floating point: {', '.join(integer)}; quantised heads are not read")
    renamed = {names[published]: tensor for published, tensor in given.items()}
    found = differences(
        renamed, _head_shapes(ours) | {n: tuple(t.shape) for n, t in renamed.items() if n.startswith(("prefix.", "embed."))}
    )
    if found:
        raise CheckpointError(f"the tensors, under our names, are not what config.json says: {found}")
    return "hydra", ours, renamed


def _read_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    arch = config.get("hydra_head_arch")
    if arch not in ARCHES:
        raise CheckpointError(f"config.json has hydra_head_arch {arch!r}, which is not read here; {near(str(arch), ARCHES)}")
    if "grounded_heads" not in config:
        raise CheckpointError("config.json has no grounded_heads: whether these heads see the tokens drafted before them cannot be told")
    if not flag(config, "grounded_heads", True):
        raise CheckpointError("config.json has grounded_heads false: heads that see no tokens are Medusa's, and not read in this form")
    if config.get("hidden_state_offset", 0) != 0:
        raise CheckpointError(
            f"config.json has hidden_state_offset {config['hidden_state_offset']!r}: only heads on the last layer's features (0) are read"
        )
    output = tensors.get("hydra_lm_head.0.weight" if arch == "mlp" else "hydra_lm_head.0.1.weight")
    if output is None or output.ndim != 2:
        raise CheckpointError(f"there is no lm_head of the first head of architecture {arch}, from which the sizes would be told")
    base = config.get("base_model_name_or_path") or ""
    if not isinstance(base, str):
        raise CheckpointError(f"config.json has base_model_name_or_path {base!r}; it must be a name")
    layer = mapping(config, "eyas").get("layer")
    if layer is not None and not (isinstance(layer, dict) and layer.keys() == _SHAPE):
        raise CheckpointError(f'config.json has an "eyas": "layer" that is no shape of a layer; one has {", ".join(sorted(_SHAPE))}')
    ours = {
        "heads": count(config, "hydra_num_heads"), "blocks": count(config, "hydra_num_layers"), "hidden_size": output.shape[1],
        "vocab_size": output.shape[0], "arch": arch, "layer": layer, "base_model": base,
    }  # fmt: skip
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Our config and tensors -> config.json and tensors as published."""
    assert method in METHODS, method
    names = {ours: published for published, ours in _names(config).items()}
    missing = names.keys() - tensors.keys() - {"embed.weight"}
    unknown = tensors.keys() - names.keys()
    assert not missing | unknown, (missing, unknown)
    published = {
        "hydra_num_heads": config["heads"], "hydra_num_layers": config["blocks"], "hydra_head_arch": config["arch"],
        "grounded_heads": True, "hidden_state_offset": 0, "base_model_name_or_path": config["base_model"],
    }  # fmt: skip
    own = {**config.get("eyas", {}), **({"layer": config["layer"]} if config["layer"] else {})}
    return {**published, **({"eyas": own} if own else {})}, {names[ours]: tensor for ours, tensor in tensors.items()}


def _head_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Our names and shapes of what the config tells: all but the prefix layer and the table."""
    D, V, out = config["hidden_size"], config["vocab_size"], dict[str, tuple[int, ...]]()
    for k in range(config["heads"]):
        first = {"linear.weight": (D, (k + 2) * D), "linear.bias": (D,), "residual.weight": (D, (k + 2) * D), "residual.bias": (D,)}
        out |= {f"mlp.{k}.0.{part}": shape for part, shape in first.items()}
        for j in range(1, config["blocks"]):
            out |= {f"mlp.{k}.{j}.weight": (D, D), f"mlp.{k}.{j}.bias": (D,)}
        out |= {f"lm_head.{k}.weight": (V, D), f"lm_head.{k}.bias": (V,)}
    return out


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Published tensor name -> ours."""
    prefixed = config["arch"] == "prefix-mlp"
    names = {"input_embed_fn.weight": "embed.weight"}
    for ours in _head_shapes(config):
        part, k, *rest = ours.split(".")
        if part == "lm_head":
            names[f"hydra_lm_head.{k}.{'1.' * prefixed}{rest[0]}"] = ours
            continue
        j, last = int(rest[0]), rest[-1]
        inner = "res_connection" if rest[1] == "residual" else "linear"
        names[f"hydra_mlp.{k}.{2 * j + 1 if prefixed else j}.{inner}.{last}"] = ours
    return names | ({_PREFIX + published: ours for published, ours in _LAYER.items()} if prefixed else {})
