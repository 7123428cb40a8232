"""Hydra heads as their authors publish them.

    config.json     hydra_num_heads, hydra_num_layers (residual blocks of a head), hydra_head_arch, grounded_heads, hidden_state_offset (0
                    when absent), base_model_name_or_path
    file            hydra_lm_head.pt, which an export writes; otherwise eyas writes a safetensors file with the same names
    tensors         hydra_mlp.{head}.{place}.linear.weight [D, (head + 2) D] and .bias, hydra_mlp.{head}.{place}.res_connection.weight and
                    .bias of a head's first block; only linear [D, D] of the others; hydra_lm_head.{head}.weight [V, D] and .bias

Two architectures are read. "mlp" is Hydra: block j has place j. "prefix-mlp" is Hydra++: its
training puts dropout between the blocks, so block j has place 2j + 1 and the lm_heads are
hydra_lm_head.{head}.1. A decoder layer of the base model's shape comes first: prefix_embeding_layer.layers.0
(the authors' spelling), with prefix_embeding_layer.norm. The layer's sizes are not in config.json; they are the
base model's, so they are taken from the target. Two embedding tables may be in the file: input_embed_fn.weight,
the base model's, and prefix_embeding_layer.embed_tokens.weight, which no reader uses and which is left out
here.

Refused: other architectures (cross-attn, eagle-attn), heads that see no tokens (grounded_heads
false: those are Medusa's), features of another layer than the last (hidden_state_offset).

Our config, which `read` returns and `write` takes:

    heads, blocks, hidden_size, vocab_size     int
    arch           "mlp" or "prefix-mlp"
    layer          of prefix-mlp in heads written by eyas: the shape of the layer; None: the base model's
    base_model     str, "" when absent: the target's name where the head was trained; not checked
    eyas           only in heads written by eyas: the writer's record
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published, Shape, count, differences, flag, layer_names, mapping, refuse_dtypes, text
from eyas.errors import CheckpointError, near

__all__ = ["EXPORTS", "EXPORT_FILE", "METHODS", "NAME", "export", "read", "recognises", "usage", "write"]

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

METHODS = EXPORTS = ("hydra",)
NAME = "hydra"
EXPORT_FILE = "hydra_lm_head.pt"
ARCHES = ("mlp", "prefix-mlp")

_LAYER_KEYS = {  # keys of our config for the shape of the prefix layer
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_eps", "rope_theta", "rope_scaling", "qkv_bias",
}  # fmt: skip
_NEWER_KEYS = {"qk_norm"}  # not in the configs of earlier versions
_PREFIX = "prefix_embeding_layer."
EMBEDDINGS = "input_embed_fn.weight"
_LAYER_NAMES = {
    f"{_PREFIX}{published}": ours
    for published, ours in {
        "layers.0.input_layernorm.weight": "prefix.input_norm.weight",
        **layer_names("layers.0", "prefix"),
        "norm.weight": "prefix.norm.weight",
    }.items()
    if not ours.endswith(("bias", "q_norm.weight", "k_norm.weight"))
}


def recognises(config: Config, names: Collection[str]) -> bool:
    """Return whether config.json counts Hydra heads."""
    return "hydra_num_heads" in config


def read(config: Config, tensors: Tensors) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("hydra", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    ours = _read_config(config, tensors)
    names, shapes = _names(ours), _head_shapes(ours)
    used = {name: tensor for name, tensor in tensors.items() if name != f"{_PREFIX}embed_tokens.weight"}
    # no file says the sizes of the prefix layer
    expected = {name: shapes.get(our_name, _shape_in(used, name)) for name, our_name in names.items()}
    if faults := differences(used, expected, optional=[EMBEDDINGS]):
        raise CheckpointError(f"the tensors differ from config.json: {faults}")
    refuse_dtypes(used)
    return "hydra", ours, {names[published]: tensor for published, tensor in used.items()}


def _shape_in(tensors: Tensors, name: str) -> Shape:
    return tuple(tensors[name].shape) if name in tensors else ()


def _refuse(config: Config) -> None:
    """Raise CheckpointError for settings whose computation is not supported."""
    arch, offset = config.get("hydra_head_arch"), config.get("hidden_state_offset", 0)
    if arch not in ARCHES:
        hint = near(str(arch), ARCHES)
        raise CheckpointError(f"config.json has hydra_head_arch {arch!r}, which is not read here; {hint}")
    if "grounded_heads" not in config:
        raise CheckpointError("config.json has no grounded_heads: do these heads see the tokens drafted before them?")
    if not flag(config, "grounded_heads", True):
        raise CheckpointError(
            "config.json has grounded_heads false: these are Medusa's heads, in a form that is not read"
        )
    if offset != 0:
        raise CheckpointError(
            f"config.json has hidden_state_offset {offset!r}: only features of the last layer (0) are read"
        )


def _read_config(config: Config, tensors: Tensors) -> dict[str, Any]:
    _refuse(config)
    arch = config["hydra_head_arch"]
    output = tensors.get("hydra_lm_head.0.weight" if arch == "mlp" else "hydra_lm_head.0.1.weight")
    if output is None or output.ndim != 2:
        raise CheckpointError(f"there is no lm_head of the first head of architecture {arch}, which tells the sizes")
    layer = mapping(config, "eyas").get("layer")
    if layer is not None and not (isinstance(layer, dict) and layer.keys() - _NEWER_KEYS == _LAYER_KEYS):
        wanted = ", ".join(sorted(_LAYER_KEYS))
        raise CheckpointError(f'config.json has an "eyas": "layer" that is not the shape of a layer; one has {wanted}')
    heads, blocks = count(config, "hydra_num_heads"), count(config, "hydra_num_layers")
    if heads * blocks > len(tensors):
        raise CheckpointError(f"the file holds {len(tensors)} tensors, too few for {heads} heads of {blocks} blocks")
    ours = {
        "heads": heads,
        "blocks": blocks,
        "hidden_size": output.shape[1],
        "vocab_size": output.shape[0],
        "arch": arch,
        "layer": layer,
        "base_model": text(config, "base_model_name_or_path"),
    }
    return {**ours, "eyas": config["eyas"]} if "eyas" in config else ours


def write(method: str, config: Config, tensors: Tensors) -> Published:
    """Return config.json and the tensors as published."""
    assert method in METHODS, method
    names = {ours: published for published, ours in _names(config).items()}
    assert names.keys() - {"embed.weight"} <= tensors.keys() <= names.keys(), names.keys() ^ tensors.keys()
    record = {**config.get("eyas", {}), **({"layer": config["layer"]} if config["layer"] else {})}
    published = {
        "hydra_num_heads": config["heads"],
        "hydra_num_layers": config["blocks"],
        "hydra_head_arch": config["arch"],
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": config["base_model"],
        **({"eyas": record} if record else {}),
    }
    return published, {names[ours]: tensor for ours, tensor in tensors.items()}


def export(method: str, config: Config, tensors: Tensors, target: ExportTarget) -> Published:
    """Return the result of `write`; the target's name is added where it was not recorded."""
    return write(method, {**config, "base_model": target.name or config["base_model"]}, tensors)


def usage(method: str, config: Config, folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which the authors' code runs the head."""
    return [f'HydraModel.from_pretrained("{folder}")']


def _head_shapes(config: Config) -> dict[str, Shape]:
    """Return our names and the shapes that the config tells: all but the prefix layer and the embeddings."""
    D, V = config["hidden_size"], config["vocab_size"]
    out: dict[str, Shape] = {}
    for k in range(config["heads"]):
        for part in ("linear", "residual"):
            out |= {f"mlp.{k}.0.{part}.weight": (D, (k + 2) * D), f"mlp.{k}.0.{part}.bias": (D,)}
        for j in range(1, config["blocks"]):
            out |= {f"mlp.{k}.{j}.weight": (D, D), f"mlp.{k}.{j}.bias": (D,)}
        out |= {f"lm_head.{k}.weight": (V, D), f"lm_head.{k}.bias": (V,)}
    return out


def _names(config: Config) -> dict[str, str]:
    """Return our name of each published tensor."""
    prefixed = config["arch"] == "prefix-mlp"
    names = {EMBEDDINGS: "embed.weight"}
    for ours in _head_shapes(config):
        part, k, *rest = ours.split(".")
        if part == "lm_head":
            names[f"hydra_lm_head.{k}.{'1.' * prefixed}{rest[0]}"] = ours
        else:
            place = 2 * int(rest[0]) + 1 if prefixed else int(rest[0])
            inner = "res_connection" if rest[1] == "residual" else "linear"
            names[f"hydra_mlp.{k}.{place}.{inner}.{rest[-1]}"] = ours
    return names | (_LAYER_NAMES if prefixed else {})
