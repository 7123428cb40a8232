"""Heads of the speculators library of the vLLM project: EAGLE-3, the block heads DFlash, DFlash 2 and DSpark, and MTP
modules, which are read as modules that eyas trained (`mtp`). P-EAGLE heads are read by `peagle`.

config.json has `speculators_model_type`, and the config of the layers under `transformer_layer_config`;
docs/reference/head_formats.md says the rest. Layer ids are indices of hidden_states, as ours. Our configs and our tensor
names: see `_eagle3`, `_block` and `mtp`.

In block heads a window is counted from the root for all slots of a block; within the block such a layer sees earlier
slots only, unless `sliding_window_non_causal` is true. Embeddings and logits have no factors, even if the
target's have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import _block, mtp
from eyas.checkpoints._eagle3 import (
    CARRIES,
    IDS,
    assemble,
    check_dtypes,
    choice,
    draft_ids,
    is_parallel,
    layer_ids,
    refuse,
)
from eyas.checkpoints._llama import are_rising, count, flag, mapping, text
from eyas.errors import CheckpointError, first_line

__all__ = ["read", "recognises"]

_Head = tuple[str, dict[str, Any], dict[str, Tensor]]
_MTP_LAYER = "mtp_layers.0."
_MTP_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}
# copies of the target's, kept for training
_UNUSED_BY_BLOCKS = ("verifier_norm.weight", "verifier_lm_head.weight")
_UNUSED_BY_MTP = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
_BLOCK_IDS = "aux_hidden_state_layer_ids"
_DSPARK = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_SECOND = {"taps": 2, "group": 16, "selector_rank": 256, "candidates": 16}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is of the library, and of no P-EAGLE head."""
    return config.get("speculators_model_type") is not None and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    """Return method, config and tensors of a head of the library speculators. Raise CheckpointError for types not
    read."""
    kind = str(config["speculators_model_type"])
    if kind not in _READERS:
        raise CheckpointError(
            f"this is a head of the speculators type {kind!r}; of that library, heads of types 'eagle3', 'peagle', 'dflash', 'dflash2', "
            "'dspark' and 'mtp' are read"
        )
    return _READERS[kind](config, tensors)


def _with_defaults(layer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the config of a layer, with transformers' defaults for settings that the library leaves out."""
    from transformers import AutoConfig

    try:
        full: dict[str, Any] = AutoConfig.for_model(**{**layer, "model_type": kind}).to_dict()
    except Exception as error:  # transformers checks the values in its own ways
        raise CheckpointError(f"transformer_layer_config cannot be read: {first_line(error, 200)}") from error
    return {**full, **layer}


# --- EAGLE-3 -----------------------------------------------------------------------------------------


def _read_eagle3(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    layer = mapping(config, "transformer_layer_config")
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layer")
    if layer.get("model_type") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"the layer of this head is of model_type {layer.get('model_type')!r}; heads with a 'llama' or 'qwen3' layer are read"
        )
    is_qwen3 = layer["model_type"] == "qwen3"
    layer = _with_defaults(layer, "qwen3") if is_qwen3 else layer
    if config.get("norm_before_residual") is None:
        raise CheckpointError(
            "config.json has no norm_before_residual, which speculators takes for false and vLLM for true; say which by adding "
            '"norm_before_residual": true or false'
        )
    eyas = mapping(config, "eyas")
    settings = {
        **layer_ids(config, config.get(IDS), "input"),
        **{key: flag(config, key, False) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "carries": choice(eyas, "carries", CARRIES) or ("normed" if flag(config, "norm_output", False) else "raw"),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "qk_norm": is_qwen3,
    }
    refuse(config)
    return "eagle3", *assemble(layer, tensors, settings, ("layers.0",), eyas)


# --- block heads -------------------------------------------------------------------------------------


def _read_block(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    kind, layer, ids = str(config["speculators_model_type"]), _layer_of_block(config), config.get(_BLOCK_IDS)
    _block.refuse(layer)
    if not are_rising(ids, 0):
        raise CheckpointError(
            f"config.json has {_BLOCK_IDS} {ids!r}; they must be whole numbers from 0 on, each above the one before"
        )
    windows = _block.attention_kinds({**layer, "is_causal": None})["windows"]
    ordered = not flag(config, "sliding_window_non_causal", kind == "dflash2")
    ours = {
        **_block.base(layer, config, ids),
        "from_anchor": flag(config, "sample_from_anchor", kind == "dspark"),
        "windows": windows,
        "causal": tuple(window is not None for window in windows) if ordered else (),
        "anchored": True,
        "embed_scale": 1.0,
        "logit_scale": 1.0,
        "logit_cap": 0.0,
        **dict.fromkeys(_block.SECOND_PARTS, 0),
    }
    if kind == "dspark":
        ours |= _block.dspark_parts(config, _DSPARK)
    if kind == "dflash2":
        ours |= {part: count(config, _block.SECOND_PARTS[part], default) for part, default in _SECOND.items()}
    if count(config, "target_hidden_size", ours["hidden_size"]) != ours["hidden_size"]:
        raise CheckpointError("config.json has a target_hidden_size other than its hidden_size: one of them is wrong")
    drafted, vocabulary = count(config, "draft_vocab_size"), ours["vocab_size"]
    ours["draft_vocab"] = 0 if drafted == vocabulary else drafted
    held = {name: tensor for name, tensor in tensors.items() if name not in (*_UNUSED_BY_BLOCKS, "d2t", "t2d")}
    if ours["draft_vocab"]:
        held |= _drafted_tokens(tensors, vocabulary, drafted)
    ours |= {"eyas": config["eyas"]} if "eyas" in config else {}
    return kind, ours, _block.read_tensors(ours, held, True, layer)


def _layer_of_block(config: Mapping[str, Any]) -> dict[str, Any]:
    layer = mapping(config, "transformer_layer_config")
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layers")
    kind = layer.get("model_type", "qwen3")
    if kind not in ("qwen3", "llama"):
        raise CheckpointError(f"the layers of this head are of model_type {kind!r}; heads with qwen3 layers are read")
    return {**_with_defaults(layer, kind), "model_type": "qwen3"}


def _drafted_tokens(tensors: Mapping[str, Tensor], vocabulary: int, drafted: int) -> dict[str, Tensor]:
    """Return our `draft_ids`, by d2t and t2d."""
    if "lm_head.weight" not in tensors or "d2t" not in tensors:
        raise CheckpointError(
            f"a head that drafts {drafted} of {vocabulary} tokens has lm_head.weight and d2t; one is missing"
        )
    maps = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    check_dtypes(maps)
    wanted = {"d2t": (drafted,), "t2d": (vocabulary,)}
    if any(tensor.shape != wanted[name] for name, tensor in maps.items()):
        raise CheckpointError(f"d2t must have {drafted} entries and t2d {vocabulary}, as config.json says")
    ids = draft_ids(tensors, vocabulary, drafted)
    return {} if ids is None else {"draft_ids": ids}


# --- MTP modules -------------------------------------------------------------------------------------


def _read_mtp(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _Head:
    layer = mapping(config, "transformer_layer_config")
    kind = text(layer, "model_type")
    if not kind:
        raise CheckpointError("config.json has no transformer_layer_config with a model_type, the target's")
    if count(config, "num_nextn_predict_layers", 1) != 1:
        raise CheckpointError(
            f"config.json has num_nextn_predict_layers {config['num_nextn_predict_layers']}; one module is read"
        )
    full = _with_defaults(layer, kind)
    written = {
        "target_model_type": kind,
        **{key: full.get(key) for key in ("hidden_size", "vocab_size", "max_position_embeddings")},
        "eyas": mapping(config, "eyas"),
    }
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name in _UNUSED_BY_MTP:
            continue
        if not name.startswith(_MTP_LAYER):
            raise CheckpointError(f"unexpected tensor {name}: names begin with {_MTP_LAYER}")
        part, _, rest = name.removeprefix(_MTP_LAYER).partition(".")
        new = f"{_MTP_NAMES[part]}.{rest}" if part in _MTP_NAMES else f"mtp_block.{part}.{rest}"
        renamed[f"layers.0.{new}"] = tensor
    return mtp.read(written, _with_joined_experts(renamed))


def _with_joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors after joining the matrices of all experts into one, as transformers' layers store them."""
    single = {
        name: match for name in tensors if (match := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)_proj\.weight", name))
    }
    out = {name: tensor for name, tensor in tensors.items() if name not in single}
    if not single:
        return out
    stem, experts = next(iter(single.values()))[1], 1 + max(int(match[2]) for match in single.values())
    wanted = {part: [f"{stem}.{e}.{part}_proj.weight" for e in range(experts)] for part in ("gate", "up", "down")}
    missing = [name for names in wanted.values() for name in names if name not in tensors]
    if missing or len(single) != 3 * experts:
        raise CheckpointError(f"the experts of the module are not complete: {(missing or sorted(single))[0]}")
    gate, up, down = (torch.stack([tensors[name] for name in names]) for names in wanted.values())
    return out | {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}


_READERS = {
    "eagle3": _read_eagle3,
    "mtp": _read_mtp,
    **dict.fromkeys(("dflash", "dflash2", "dspark"), _read_block),
}
