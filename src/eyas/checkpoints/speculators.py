"""EAGLE-3 heads of the speculators library of the vLLM project. Read only.

    config.json     speculators_model_type "eagle3"; the layer's LLaMA config under `transformer_layer_config`; beside it
                    draft_vocab_size, target_hidden_size, eagle_aux_hidden_state_layer_ids (index of hidden_states, as ours; null:
                    2, L//2, L-3), norm_before_residual, norm_before_fc, fc_norm, norm_output (the normed state is carried)
    tensors         fc, layers.0.*, norm, lm_head, d2t and t2d, mostly embed_tokens, and input_norm or fc_norm.i

Heads of other types (dflash, peagle, mtp ...) and layers that are no LLaMA's are refused by name. Our config and our tensor names: see
`_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import CARRIES, IDS, assemble, choice, layer_ids, refuse
from eyas.checkpoints._llama import flag, mapping
from eyas.errors import CheckpointError

__all__ = ["METHODS", "read", "recognises"]

METHODS = ()


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether config.json is of the library, whatever the type of the head."""
    return "speculators_model_type" in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("eagle3", our config, our tensors). CheckpointError names everything that does not fit."""
    kind, layer = config["speculators_model_type"], mapping(config, "transformer_layer_config")
    if kind != "eagle3":
        raise CheckpointError(f"this is a head of the speculators type {kind!r}; of that library, heads of type 'eagle3' are read")
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layer")
    if layer.get("model_type") != "llama":
        raise CheckpointError(f"the layer of this head is of model_type {layer.get('model_type')!r}; heads with a 'llama' layer are read")
    if config.get("norm_before_residual") is None:
        raise CheckpointError(
            "config.json has no norm_before_residual, which speculators takes for false and vLLM for true; say which by adding "
            '"norm_before_residual": true or false'
        )
    eyas = mapping(config, "eyas")
    settings = {
        **layer_ids(config, config.get(IDS), "input"),
        **{key: flag(config, key, False) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "carries": choice(eyas, "carries", CARRIES) or ("normed" if flag(config, "norm_output", False) else "raw"),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    refuse(config)
    return "eagle3", *assemble(layer, tensors, settings, ("layers.0",), eyas)
