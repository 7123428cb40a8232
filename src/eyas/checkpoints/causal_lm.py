"""Whole language models as Hugging Face publishes them, with config.json and tensors unchanged.
They draft for a larger model.

They are recognised by their tensor names: decoder layers and a table of embeddings. transformers
knows what the names mean; our config is theirs, with the writer's record under "eyas" in models
written by eyas.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._weights import Published

__all__ = ["METHODS", "is_whole_model", "read", "recognises", "write"]

METHODS = ("small_model",)

_LAYER = re.compile(r"(model\.((language_model|decoder)\.)?layers|gpt_neox\.layers|(transformer\.)?h)\.\d+\.")
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether these are the tensors of a whole model without a token for masks (`pard`)."""
    return is_whole_model(config, names) and config.get("pard_token") is None and config.get("ptd_token_id") is None


def is_whole_model(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether these are the tensors of a whole language model."""
    has_layers = any(_LAYER.match(name) for name in names)
    has_table = any(name.endswith(_TABLES) for name in names)
    # Medusa-2 models and Gemma's assistants have such layers, and are other formats
    is_other = "medusa_num_heads" in config or "backbone_hidden_size" in config
    return has_layers and has_table and "model_type" in config and not is_other


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors unchanged."""
    return "small_model", dict(config), dict(tensors)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors unchanged."""
    assert method in METHODS, method
    return dict(config), dict(tensors)
