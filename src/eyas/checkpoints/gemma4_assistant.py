"""Gemma 4's assistants as Google publishes them (docs/reference/head_formats.md), with config.json and tensors unchanged but
for keys and values that no layer uses.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._llama import count, mapping
from eyas.checkpoints._weights import refuse_dtypes
from eyas.core.params import is_whole
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_ORDER = "masked_embedding.token_ordering"
_UNSUPPORTED = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
_OWN_KEYS = re.compile(r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is an assistant's."""
    return config.get("model_type") in MODEL_TYPES


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors unchanged, without weights that no layer uses."""
    if not mapping(config, "text_config"):
        raise CheckpointError("config.json of an assistant has no text_config")
    count(config, "backbone_hidden_size")
    settings = config["text_config"]
    wrong = [name for name in _UNSUPPORTED if settings.get(name)]
    if wrong:
        raise CheckpointError(
            f"text_config has {', '.join(wrong)}, which no assistant of Google's has: such layers are not read"
        )
    window = settings.get("sliding_window", 1)
    if not is_whole(window) or not 1 <= window < 2**31:
        raise CheckpointError(f"text_config.sliding_window must be a number of tokens, got {str(window)[:40]!r}")
    refuse_dtypes(tensors, but=[_ORDER])
    order_V = tensors.get(_ORDER)
    if order_V is not None and (
        order_V.is_floating_point() or order_V.ndim != 1 or sorted(order_V.tolist()) != list(range(len(order_V)))
    ):
        raise CheckpointError(f"{_ORDER} does not order the tokens: each token id has to be there once")
    used = {name: tensor for name, tensor in tensors.items() if not _OWN_KEYS.match(name)}
    return "gemma4_assistant", dict(config), used
