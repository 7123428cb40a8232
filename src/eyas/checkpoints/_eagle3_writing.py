"""EAGLE-3 heads on their way to a published format: the tensors under published names, and the keys
that several formats share.

This module does not know in which format a head will be published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints._eagle3 import complete, names_of, shapes
from eyas.checkpoints._llama import write_layer
from eyas.checkpoints._weights import differences

__all__ = ["dtype_of", "layer_config", "publish_tensors"]


def publish_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our config with every key, and the tensors under their published names; `layer` is the published name of
    the first layer.

    A smaller draft vocabulary becomes d2t (offsets, target id - draft id) and t2d (marks of the
    same ids).
    """
    ours = complete(config)
    optional = {"embed.weight"} if ours["target_hidden_size"] == ours["hidden_size"] else set()
    faults = differences(tensors, shapes(ours), optional)
    assert not faults, faults
    names = names_of(layer, ours["num_features"], ours["layers"])
    published = {name: tensors[our_name] for name, our_name in names.items() if our_name in tensors}
    if "draft_ids" in tensors:
        ids = tensors["draft_ids"].cpu()
        assert 0 <= int(ids.min()) <= int(ids.max()) < ours["vocab_size"], "draft_ids leave the vocabulary"
        assert bool((ids.diff() > 0).all()), "draft_ids do not increase"
        published["d2t"] = ids - torch.arange(len(ids))
        published["t2d"] = torch.zeros(ours["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return ours, published


def layer_config(ours: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the keys of a LLaMA config.json, with the head's record, for what `publish_tensors` returns."""
    window = ours["window"]
    keys = {**write_layer(ours), "torch_dtype": dtype_of(tensors["fc.weight"])}
    if window:
        kinds = ["sliding_attention"] * ours["layers"]
        keys |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    return {**keys, "eyas": dict(ours["eyas"])} if ours.get("eyas") else keys


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as a config.json has it, like float16."""
    return str(tensor.dtype).removeprefix("torch.")
