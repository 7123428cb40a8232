"""Whole language models as Hugging Face publishes them: config.json and tensors as they are. They can draft for a larger one.

Told by the names of the tensors: decoder layers inside of a model, and a table of embeddings. What the names mean is for transformers to
say; our config is theirs, with "eyas" in models that we wrote: a dict with what the writer recorded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

__all__ = ["METHODS", "read", "recognises", "write"]

METHODS = ("small_model",)

_LAYER = re.compile(r"(model\.((language_model|decoder)\.)?layers|gpt_neox\.layers|(transformer\.)?h)\.\d+\.")
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these are the tensors of a whole model."""
    inner = any(_LAYER.match(name) for name in names)
    return inner and any(name.endswith(_TABLES) for name in names) and "model_type" in config and "medusa_num_heads" not in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """As they are."""
    return "small_model", dict(config), dict(tensors)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As they are."""
    assert method in METHODS, method
    return dict(config), dict(tensors)
