"""EAGLE-3 heads of the speculators library of the vLLM project.

    config.json     speculators_model_type "eagle3"; the layer's LLaMA config under `transformer_layer_config`; beside it
                    draft_vocab_size, target_hidden_size, eagle_aux_hidden_state_layer_ids (index of hidden_states, as ours; null:
                    2, L//2, L-3), norm_before_residual, norm_before_fc, fc_norm, norm_output (the normed state is carried)
    tensors         fc, layers.0.*, norm, lm_head, d2t and t2d, mostly embed_tokens, and input_norm or fc_norm.i

P-EAGLE heads are read by `peagle`, block heads by `speculators_block`, MTP modules by `speculators_mtp`; heads of other
types (xpress) and layers other than LLaMA's and Qwen3's are refused by name. Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import CARRIES, IDS, assemble, choice, is_parallel, layer_ids, refuse
from eyas.checkpoints._llama import flag, mapping
from eyas.errors import CheckpointError, first_line

__all__ = ["read", "recognises", "with_defaults"]

OTHERS = ("dflash", "dflash2", "dspark", "mtp")  # read by `speculators_block` and `speculators_mtp`


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is of the library, and of no head that another module reads."""
    kind = config.get("speculators_model_type")
    return kind is not None and kind not in OTHERS and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    kind, layer = config["speculators_model_type"], mapping(config, "transformer_layer_config")
    if kind != "eagle3":
        raise CheckpointError(
            f"this is a head of the speculators type {kind!r}; of that library, heads of types 'eagle3', 'peagle', 'dflash', 'dflash2', "
            "'dspark' and 'mtp' are read"
        )
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layer")
    if layer.get("model_type") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"the layer of this head is of model_type {layer.get('model_type')!r}; heads with a 'llama' or 'qwen3' layer are read"
        )
    is_qwen3 = layer["model_type"] == "qwen3"
    layer = with_defaults(layer, "qwen3") if is_qwen3 else layer
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
        "qk_norm": is_qwen3,
    }
    refuse(config)
    return "eagle3", *assemble(layer, tensors, settings, ("layers.0",), eyas)


def with_defaults(layer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the config of a layer, with transformers' defaults for what the library leaves out."""
    from transformers import AutoConfig

    try:
        full: dict[str, Any] = AutoConfig.for_model(**{**layer, "model_type": kind}).to_dict()
    except Exception as error:  # transformers checks the values in its own ways
        raise CheckpointError(f"transformer_layer_config cannot be read: {first_line(error, 200)}") from error
    return {**full, **layer}
