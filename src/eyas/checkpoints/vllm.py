"""EAGLE-3 heads in vLLM's own format. Read only.

    config.json     architectures ["Eagle3LlamaForCausalLM"], a LLaMA config, draft_vocab_size; eagle_aux_hidden_state_layer_ids beside it
                    or in `eagle_config` (the INPUT of layer i, as ours; absent: 2, L//2, L-3); target_hidden_size, norm_before_fc,
                    norm_before_residual, fc_norm, norm_output (the normed state is carried)
    tensors         as in SafeAILab's EAGLE-3, or with layers.0 for midlayer; lm_head may be absent where the vocabulary is the
                    target's; t2d is optional, and checked where it exists; fc_norm.i, input_norm

Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import VLLM, architecture, read_flat
from eyas.checkpoints._llama import flag, mapping

__all__ = ["METHODS", "read", "recognises"]

METHODS = ()


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether config.json names vLLM's class."""
    return architecture(config) == VLLM and "speculators_model_type" not in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Published config and tensors -> ("eagle3", our config, our tensors). CheckpointError names everything that does not fit."""
    normed = flag(config, "norm_output", False) or flag(mapping(config, "eagle_config"), "norm_output", False)
    return "eagle3", *read_flat(config, tensors, "input", "normed" if normed else "raw")
