"""Kangaroo's adapters and GliDe's layers as eyas writes them: our own config and tensors, unchanged.

    config.json     eyas_adapter: the method; hidden_size, vocab_size; what else the method's `weights` says
    file            model.safetensors, with the names of the method's net

The authors publish adapters for targets of their own; their files are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints.tools import Published, count, refuse_dtypes
from eyas.errors import CheckpointError, near

__all__ = ["METHODS", "read", "recognises", "write"]

METHODS = ("glide", "kangaroo")
KEY = "eyas_adapter"


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names the method of an adapter."""
    return KEY in config


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return the method, and config and tensors unchanged."""
    if config[KEY] not in METHODS:
        raise CheckpointError(f"config.json has {KEY} {config[KEY]!r}; {near(str(config[KEY]), METHODS)}")
    for size in ("hidden_size", "vocab_size", *({"kangaroo": ["exit"]}.get(config[KEY], []))):
        count(config, size)
    refuse_dtypes(tensors)
    return config[KEY], {name: value for name, value in config.items() if name != KEY}, dict(tensors)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config.json and the tensors."""
    return {KEY: method, **config}, dict(tensors)
