"""Block heads of the speculators library of the vLLM project: DFlash, DFlash 2 and DSpark.

    config.json     speculators_model_type "dflash", "dflash2" or "dspark"; the layers' config, of Qwen3's keys, under
                    `transformer_layer_config`; beside it draft_vocab_size, block_size, mask_token_id, sample_from_anchor,
                    aux_hidden_state_layer_ids (index of hidden_states, as ours), sliding_window_non_causal; DSpark: markov_rank,
                    markov_head_type, enable_confidence_head, confidence_head_with_markov; DFlash 2: conv_kernel_size,
                    conv_group_size, selector_rank, selector_top_k
    tensors         those of the authors' forms (`dflash`, `dspark`); d2t and t2d for a smaller vocabulary, lm_head over it;
                    embed_tokens, verifier_norm and verifier_lm_head, copies of the target's, may be there

A window is counted from the root for all slots of a block; within the block such a layer sees earlier
slots only, unless `sliding_window_non_causal` is true. Embeddings and logits have no factors,
whatever the target has. Our config and our tensor names: see `_block`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints._block import SECOND_PARTS, attention_kinds, mask_token, read_tensors, refuse
from eyas.checkpoints._eagle3 import check_dtypes, draft_ids
from eyas.checkpoints._llama import count, flag, mapping, read_layer, read_rope
from eyas.checkpoints.speculators import with_defaults
from eyas.errors import CheckpointError

__all__ = ["read", "recognises"]

UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's, kept for training
ID = "aux_hidden_state_layer_ids"


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is of the library, and of a block head."""
    return config.get("speculators_model_type") in ("dflash", "dflash2", "dspark")


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return (method, our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    kind, layer = str(config["speculators_model_type"]), _layer(config)
    refuse(layer)
    ours = {
        **read_layer(layer),
        **read_rope(layer),
        "qkv_bias": False,
        "layers": count(layer, "num_hidden_layers"),
        "feature_layers": _feature_layers(config),
        "target_layers": None,
        "block": count(config, "block_size"),
        "mask_token": mask_token(config),
        "from_anchor": flag(config, "sample_from_anchor", kind == "dspark"),
        "markov_rank": 0,
        "confidence": "none",
        **_windows(config, layer),
        "anchored": True,
        "embed_scale": 1.0,
        "logit_scale": 1.0,
        "logit_cap": 0.0,
        **dict.fromkeys(SECOND_PARTS, 0),
    }
    if kind == "dspark":
        ours |= _dspark_parts(config)
    if kind == "dflash2":
        ours |= {"taps": count(config, "conv_kernel_size", 2), "group": count(config, "conv_group_size", 16)}
        ours |= {
            "selector_rank": count(config, "selector_rank", 256),
            "candidates": count(config, "selector_top_k", 16),
        }
    if count(config, "target_hidden_size", ours["hidden_size"]) != ours["hidden_size"]:
        raise CheckpointError("config.json has a target_hidden_size other than its hidden_size: one of them is wrong")
    drafted, vocabulary = count(config, "draft_vocab_size"), ours["vocab_size"]
    ours["draft_vocab"] = 0 if drafted == vocabulary else drafted
    held = {name: tensor for name, tensor in tensors.items() if name not in (*UNUSED, "d2t", "t2d")}
    if ours["draft_vocab"]:
        held |= _drafted_tokens(tensors, vocabulary, drafted)
    ours |= {"eyas": config["eyas"]} if "eyas" in config else {}
    return kind, ours, read_tensors(ours, held, True, layer)


# --- parts of config.json ----------------------------------------------------------------------------


def _layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the layers, with transformers' defaults for what the library leaves out."""
    layer = mapping(config, "transformer_layer_config")
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layers")
    kind = layer.get("model_type", "qwen3")
    if kind not in ("qwen3", "llama"):
        raise CheckpointError(f"the layers of this head are of model_type {kind!r}; heads with qwen3 layers are read")
    return {**with_defaults(layer, kind), "model_type": "qwen3"}


def _feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get(ID)
    are_ids = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    if not are_ids or not ids or ids != sorted(set(ids)):
        raise CheckpointError(
            f"config.json has {ID} {ids!r}; they must be whole numbers from 0 on, each above the one before"
        )
    return tuple(ids)


def _windows(config: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `windows` and `causal` of the layers."""
    windows = attention_kinds({**layer, "is_causal": None})["windows"]
    ordered = not flag(config, "sliding_window_non_causal", config["speculators_model_type"] == "dflash2")
    return {"windows": windows, "causal": tuple(window is not None for window in windows) if ordered else ()}


def _dspark_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    rank = config.get("markov_rank", 256)
    if type(rank) is not int or rank < 0:
        raise CheckpointError(f"config.json has markov_rank {rank!r}; it must be a whole number, 0 or more")
    if rank and config.get("markov_head_type", "vanilla") != "vanilla":
        raise CheckpointError(
            f"config.json has markov_head_type {config['markov_head_type']!r}; those of type 'vanilla' are read"
        )
    confident = flag(config, "enable_confidence_head", True)
    reads_markov = flag(config, "confidence_head_with_markov", True)
    if confident and reads_markov and not rank:
        raise CheckpointError("config.json has a confidence head that reads the Markov head, and markov_rank 0")
    return {"markov_rank": rank, "confidence": ("hidden+markov" if reads_markov else "hidden") if confident else "none"}


def _drafted_tokens(tensors: Mapping[str, Tensor], vocabulary: int, drafted: int) -> dict[str, Tensor]:
    """Return our `draft_ids`, by d2t and t2d."""
    if "lm_head.weight" not in tensors or "d2t" not in tensors:
        raise CheckpointError(
            f"a head that drafts {drafted} of {vocabulary} tokens has lm_head.weight and d2t; one is missing"
        )
    check_dtypes({name: tensors[name] for name in ("d2t", "t2d") if name in tensors})
    if tuple(tensors["d2t"].shape) != (drafted,) or tensors.get(
        "t2d", torch.zeros(vocabulary, dtype=torch.bool)
    ).shape != (vocabulary,):
        raise CheckpointError(f"d2t must have {drafted} entries and t2d {vocabulary}, as config.json says")
    ids = draft_ids(tensors, vocabulary, drafted)
    return {} if ids is None else {"draft_ids": ids}
