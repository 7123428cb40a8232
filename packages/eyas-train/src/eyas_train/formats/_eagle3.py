"""EAGLE-3 heads on their way to another engine: the parts of config.json that several formats share, and the
settings that none of their engines computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints.tools import layer_config, publish_tensors
from eyas.errors import CheckpointError

__all__ = ["publish", "refuse_qkv_bias"]


def publish(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str, reader: str, qk_norm: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Convert to the parts that every format for other engines needs. Raise CheckpointError for biases, which none of
    them computes, and for Qwen3's layers.

    Args:
        layer: the published name of the first layer.
        reader: the engine's name, for messages.
        qk_norm: whether the engine computes Qwen3's layers.

    Returns:
        our complete config, the keys of a LLaMA config.json, and the tensors under their published names.
    """
    ours, published = publish_tensors(config, tensors, layer)
    refuse_qkv_bias(ours, reader)
    if ours["qk_norm"] and not qk_norm:
        raise CheckpointError(
            f"the head has Qwen3's layers, with norms of queries and keys, but {reader} computes LLaMA's"
        )
    if ours["fc_bias"] and bool(published.pop("fc.bias").any()):
        raise CheckpointError(f"the head has a bias of fc, but {reader} computes none in EAGLE-3 heads")
    return ours, layer_config(ours, published), published


def refuse_qkv_bias(config: Mapping[str, Any], reader: str) -> None:
    """Raise CheckpointError if a head has biases of q, k and v; `reader` is an engine that has them only with one of o."""
    if config["qkv_bias"]:
        raise CheckpointError(
            f"the head has biases of q, k and v, but {reader} has them only together with one of o, which the head lacks"
        )
