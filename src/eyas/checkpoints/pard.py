"""PARD and PARD-2 models as AMD publishes them: whole language models that were trained on masks.

    config.json       that of a causal language model, and `pard_token` (vLLM: `ptd_token_id`), the token of a mask; PARD-2 has
                      `pard2` true or `spd_type` "pard2", `pard2_target_layers` (index of hidden_states, as ours), `pard2_target_dim`,
                      `pard2_scale` and `pard2_proj_bias`
    tensors           those of the language model
    warp_model.bin    PARD-2: target_proj.weight [D, F], and .bias

Config and tensors are taken as they are. `feature_config` and `read_projection` read what PARD-2 adds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from eyas.checkpoints._eagle3 import MASK
from eyas.checkpoints._files import read_pickle
from eyas.checkpoints._llama import count, flag, number
from eyas.checkpoints._weights import Published
from eyas.checkpoints.causal_lm import is_whole_model
from eyas.core.params import is_whole
from eyas.errors import CheckpointError

__all__ = [
    "FEATURE_FILE",
    "METHODS",
    "FeatureConfig",
    "feature_config",
    "mask_token_of",
    "read",
    "read_projection",
    "recognises",
    "write",
]

METHODS = ("pard",)
FEATURE_FILE = "warp_model.bin"
TOKENS = ("pard_token", "ptd_token_id")
SCALE, WIDTH = 0.02, 4096  # where config.json says nothing, as in the authors' code


class FeatureConfig(NamedTuple):
    """The target's features that a PARD-2 model reads."""

    layers: tuple[int, ...]  # index of hidden_states
    width: int  # F, the width of the features of all layers together
    scale: float


def mask_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the token of a mask; None for a model that was not trained on masks."""
    tokens = {config[key] for key in TOKENS if config.get(key) is not None}
    if not tokens:
        return None
    token = tokens.pop()
    if tokens or not is_whole(token):
        raise CheckpointError(f"config.json must name one mask token under {' or '.join(TOKENS)}")
    return token


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether these are the tensors of a whole model with a token for masks."""
    has_token = any(config.get(key) is not None for key in TOKENS)
    return has_token and MASK not in names and is_whole_model(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors unchanged. Raise CheckpointError for a token that is none, and bad settings of
    PARD-2."""
    mask_token_of(config)
    feature_config(config)
    return "pard", dict(config), dict(tensors)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors unchanged."""
    assert method in METHODS, method
    return dict(config), dict(tensors)


def feature_config(config: Mapping[str, Any]) -> FeatureConfig | None:
    """Return what a PARD-2 model reads of the target; None for a model of PARD."""
    if not config.get("pard2") and config.get("spd_type") != "pard2":
        return None
    layers = config.get("pard2_target_layers")
    if not isinstance(layers, list) or not layers or not all(type(k) is int and k >= 0 for k in layers):
        raise CheckpointError(
            f"config.json has pard2_target_layers {layers!r}; it must be a list of layers, as of hidden_states"
        )
    flag(config, "pard2_proj_bias", False)
    return FeatureConfig(tuple(layers), count(config, "pard2_target_dim", WIDTH), number(config, "pard2_scale", SCALE))


def read_projection(file: Path, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Return target_proj's weight, which must be of this shape, and its bias."""
    if not file.is_file():
        raise CheckpointError(
            f"{file.parent} has no {FEATURE_FILE}, which a PARD-2 model reads the target's features by: add it, "
            "or draft from the text alone: --features false"
        )
    tensors = read_pickle(file)
    weight, bias = tensors.get("target_proj.weight"), tensors.get("target_proj.bias")
    if weight is None or tuple(weight.shape) != shape or (bias is not None and tuple(bias.shape) != shape[:1]):
        found = "none" if weight is None else list(weight.shape)
        raise CheckpointError(f"{file.name}: target_proj.weight is {found} and should be {list(shape)}")
    return weight, bias
