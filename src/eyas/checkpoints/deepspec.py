"""EAGLE-3 heads of DeepSpec: a layer of Qwen3's kind, five fused layers of the target, its whole vocabulary. Read only:
eyas writes such a head in its own form (`safeailab3`).

    config.json     architectures ["Qwen3Eagle3Model"], a Qwen3 config, target_layer_ids (the OUTPUT of layer i), ttt_length
    tensors         fc.weight, layers.0.{input_layernorm,hidden_norm,post_attention_layernorm}.weight, layers.0.self_attn.*_proj.weight,
                    layers.0.self_attn.{q,k}_norm.weight, layers.0.mlp.*_proj.weight, norm.weight, lm_head.weight, embed_tokens.weight,
                    the last two mostly the target's

The state before the final norm is carried. In heads of several layers each layer would read the embedding again, which
is not computed here. Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import DEEPSPEC, architecture, assemble, layer_ids
from eyas.checkpoints._llama import mapping
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names DeepSpec's class for targets of Qwen3."""
    return architecture(config) == DEEPSPEC


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    if config.get("target_layer_ids") is None:
        raise CheckpointError("config.json has no target_layer_ids, the layers whose outputs the head reads")
    settings = {**layer_ids(config, config["target_layer_ids"], "output"), "qk_norm": True}
    return "eagle3", *assemble(config, tensors, settings, ("layers.0",), mapping(config, "eyas"), several=False)
