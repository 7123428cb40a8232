"""Whole language models as Hugging Face publishes them, which draft for a larger model, and those that AMD has trained on
masks (PARD, PARD-2). Config and tensors stay as they are, with the writer's record under "eyas" in models written by eyas.

They are recognised by their tensor names: decoder layers and a table of embeddings. config.json of a PARD model has
`pard_token` (vLLM: `ptd_token_id`), the token of a mask. PARD-2 adds `pard2` true or `spd_type` "pard2",
`pard2_target_layers` (index of hidden_states, as ours), `pard2_target_dim`, `pard2_scale` and
`pard2_proj_bias`. It also has a file warp_model.bin with target_proj.weight [D, F] and .bias: see
`feature_config` and `read_projection`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from eyas.checkpoints._eagle3 import MASK
from eyas.checkpoints._files import read_pickle
from eyas.checkpoints._llama import count, flag, number
from eyas.checkpoints._weights import Published
from eyas.core.params import is_whole
from eyas.errors import CheckpointError

__all__ = [
    "FEATURE_FILE", "METHODS", "FeatureConfig", "feature_config", "mask_token_of", "read", "read_projection", "recognises",
    "write",
]  # fmt: skip

METHODS = ("small_model", "pard")
FEATURE_FILE = "warp_model.bin"
TOKENS = ("pard_token", "ptd_token_id")
SCALE, WIDTH = 0.02, 4096  # where config.json says nothing, as in the authors' code

_LAYER = re.compile(r"(model\.((language_model|decoder)\.)?layers|gpt_neox\.layers|(transformer\.)?h)\.\d+\.")
_TABLES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


class FeatureConfig(NamedTuple):
    """The target's features that a PARD-2 model reads."""

    layers: tuple[int, ...]  # index of hidden_states
    width: int  # F, the width of the features of all layers together
    scale: float


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether these are the tensors of a whole language model."""
    has_layers = any(_LAYER.match(name) for name in names)
    has_table = any(name.endswith(_TABLES) for name in names)
    # Medusa-2 models, Gemma's assistants and P-EAGLE heads may have such layers, and are other formats
    is_other = "medusa_num_heads" in config or "backbone_hidden_size" in config or MASK in names
    return has_layers and has_table and "model_type" in config and not is_other


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """See `Format.read`. Raise CheckpointError for a mask's token that is not one, and bad settings of PARD-2."""
    method = "small_model" if mask_token_of(config) is None else "pard"
    if method == "pard":
        feature_config(config)
    return method, dict(config), dict(tensors)


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors as they are: a small model needs no translation."""
    return dict(config), dict(tensors)


def mask_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the token of a mask; None for a model that was not trained on masks."""
    tokens = {config[key] for key in TOKENS if config.get(key) is not None}
    if not tokens:
        return None
    token = tokens.pop()
    if tokens or not is_whole(token):
        raise CheckpointError(f"config.json must name one mask token under {' or '.join(TOKENS)}")
    return token


def feature_config(config: Mapping[str, Any]) -> FeatureConfig | None:
    """Return the layers that a PARD-2 model reads of the target; None for a model of PARD."""
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
