"""EAGLE-3 heads in vLLM's own format.

    config.json     architectures ["Eagle3LlamaForCausalLM"], a LLaMA config, draft_vocab_size; eagle_aux_hidden_state_layer_ids beside it
                    or in `eagle_config` (the INPUT of layer i, as ours; absent: 2, L//2, L-3); target_hidden_size, norm_before_fc,
                    norm_before_residual, fc_norm, norm_output (the normed state is carried)
    tensors         as in SafeAILab's EAGLE-3, or with layers.0 for midlayer; lm_head may be absent where the vocabulary is the
                    target's; t2d is optional, and checked where it exists; fc_norm.i, input_norm; layers.i from 1 on are LLaMA layers
                    over hidden states; their hidden_norm, which vLLM loads and does not use, may be there

Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import IDS, VLLM, architecture, is_parallel, read_flat
from eyas.checkpoints._llama import flag, mapping

__all__ = ["read", "recognises", "settings"]


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names vLLM's class of EAGLE-3 heads."""
    return architecture(config) == VLLM and "speculators_model_type" not in config and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    normed = flag(config, "norm_output", False) or flag(mapping(config, "eagle_config"), "norm_output", False)
    return "eagle3", *read_flat(config, _without_unused(tensors), "input", "normed" if normed else "raw")


def _without_unused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the norms that vLLM's class loads for layers after the first, and
    does not use."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)
    }


def settings(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys by which this form differs from a LLaMA config.json, for our complete config."""
    found: dict[str, Any] = {key: True for key in ("norm_before_fc", "fc_norm", "norm_before_residual") if ours[key]}
    if ours["carries"] == "normed":
        found["norm_output"] = True
    if ours["target_hidden_size"] != ours["hidden_size"]:
        found["target_hidden_size"] = ours["target_hidden_size"]
    if ours["feature_layers"]:
        found |= {IDS: list(ours["feature_layers"]), "num_aux_hidden_states": ours["num_features"]}
    return {"architectures": [VLLM], "draft_vocab_size": ours["draft_vocab_size"], **found}
