"""MTP modules of the speculators library, which trains one that a target has: read as modules that eyas trained (`mtp`).

    config.json     speculators_model_type "mtp"; the target's text config under `transformer_layer_config`; num_nextn_predict_layers 1
    tensors         mtp_layers.0.{token_layernorm,hidden_layernorm,input_proj,final_layernorm}, and beside them the tensors of a decoder
                    layer of the target's class; experts in one tensor or one by one

The module reads the target's state after its final norm, and its own output in the next step. Embeddings and lm_head
are the target's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import mtp
from eyas.checkpoints._llama import count, mapping, text
from eyas.checkpoints.speculators import with_defaults
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]

LAYER = "mtp_layers.0."
NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}
UNUSED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # copies of the target's


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is of the library, and of an MTP module."""
    return config.get("speculators_model_type") == "mtp"


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("mtp", our config, our tensors) of a published head. A CheckpointError names what does not fit."""
    layer = mapping(config, "transformer_layer_config")
    kind = text(layer, "model_type")
    if not kind:
        raise CheckpointError("config.json has no transformer_layer_config with a model_type, the target's")
    if count(config, "num_nextn_predict_layers", 1) != 1:
        raise CheckpointError(
            f"config.json has num_nextn_predict_layers {config['num_nextn_predict_layers']}; one module is read"
        )
    full = with_defaults(layer, kind)
    written = {
        "target_model_type": kind,
        **{key: full.get(key) for key in ("hidden_size", "vocab_size", "max_position_embeddings")},
        "eyas": mapping(config, "eyas"),
    }
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name in UNUSED:
            continue
        if not name.startswith(LAYER):
            raise CheckpointError(f"unexpected tensor {name}: names begin with {LAYER}")
        part, _, rest = name.removeprefix(LAYER).partition(".")
        renamed[f"layers.0.{NAMES[part]}.{rest}" if part in NAMES else f"layers.0.mtp_block.{part}.{rest}"] = tensor
    return mtp.read(written, _with_joined_experts(renamed))


def _with_joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors after joining the matrices of all experts into one, as transformers' layers store them."""
    single = {
        name: match for name in tensors if (match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)_proj\.weight", name))
    }
    out = {name: tensor for name, tensor in tensors.items() if name not in single}
    if not single:
        return out
    stem, experts = next(iter(single.values()))[1], 1 + max(int(match[2]) for match in single.values())
    wanted = {part: [f"{stem}.{e}.{part}_proj.weight" for e in range(experts)] for part in ("gate", "up", "down")}
    missing = [name for names in wanted.values() for name in names if name not in tensors]
    if missing or len(single) != 3 * experts:
        raise CheckpointError(f"the experts of the module are not complete: {(missing or sorted(single))[0]}")
    gate, up, down = (torch.stack([tensors[name] for name in names]) for names in wanted.values())
    return out | {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}
