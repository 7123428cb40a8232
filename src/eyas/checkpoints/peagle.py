"""P-EAGLE heads (arXiv 2602.01469) are EAGLE-3 heads, mostly of several layers. They come in vLLM's form
(`eagle3`) or in the form of the speculators library (`speculators`), with a mask's token and a mask's features
(docs/reference/head_formats.md).

A slot after the first reads the embedding of the mask's token, and mask_hidden [F] in place of the target's features,
before the norms of features and fc. eyas writes vLLM's form, with the number of levels under "eyas".

Our config: EAGLE-3's (`_eagle3`), and `mask_token` int, `levels` int or None. Our tensors: EAGLE-3's, and mask_hidden [F].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import eagle3, speculators
from eyas.checkpoints._eagle3 import MASK, SGLANG, VLLM, architecture, is_parallel, layer_config, publish_tensors
from eyas.checkpoints._llama import count, mapping
from eyas.checkpoints._weights import Published
from eyas.core.params import is_whole
from eyas.errors import CheckpointError

__all__ = ["METHODS", "read", "recognises", "write"]

METHODS = ("peagle",)
# vLLM computes heads of all these classes in the same way
CLASSES = (VLLM, SGLANG, "PEagleDraftModel", "PeagleLlamaForCausalLM")
TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is a P-EAGLE head of any format, readable or not."""
    return is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("peagle", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    if MASK not in tensors:
        raise CheckpointError(f"the file of this P-EAGLE head has no {MASK}, the features of a mask")
    rest = {name: tensor for name, tensor in tensors.items() if name != MASK}
    token = _mask_token(config)
    if "speculators_model_type" in config:
        _, ours, our_tensors = speculators.read({**config, "speculators_model_type": "eagle3"}, rest)
        levels = _speculative_tokens(config)
    else:
        ours, our_tensors = _read_flat(config, rest)
        record = dict(ours.pop("eyas", None) or {})
        levels = record.pop("levels", None)
        ours |= {"eyas": record} if record else {}
    if levels is not None:
        levels = count({"levels": levels}, "levels")
    if ours["fc_bias"] or ours["qkv_bias"]:
        raise CheckpointError(
            "this P-EAGLE head has biases of fc or of the attention, but vLLM, which defines its format, computes none"
        )
    width = ours["num_features"] * ours["target_hidden_size"]
    mask = tensors[MASK]
    if mask.numel() != width or mask.shape[-1] != width or not mask.is_floating_point():
        raise CheckpointError(
            f"{MASK} is {list(mask.shape)} of {mask.dtype} and should hold {width} numbers, the features of a mask"
        )
    return "peagle", {**ours, "mask_token": token, "levels": levels}, {**our_tensors, MASK: mask.reshape(width)}


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config.json and the tensors as published. Raise CheckpointError for Qwen3's layers."""
    assert method in METHODS, method
    rest = {name: tensor for name, tensor in tensors.items() if name != MASK}
    ours, their_tensors = publish_tensors(config, rest, "layers.0")
    assert not any(ours[key] for key in ("fc_bias", "qkv_bias")), "P-EAGLE heads have no biases"
    if ours["qk_norm"]:
        raise CheckpointError("the head has Qwen3's layers, with norms of queries and keys, but vLLM computes LLaMA's")
    published = {**layer_config(ours, their_tensors), **eagle3.vllm_settings(ours), "parallel_drafting": True}
    published |= {"pard_token": config["mask_token"], "mask_token_id": config["mask_token"]}
    if config.get("levels"):
        published["eyas"] = {**published.get("eyas", {}), "levels": config["levels"]}
    return published, {**their_tensors, MASK: tensors[MASK][None]}


def _read_flat(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if architecture(config) not in CLASSES:
        raise CheckpointError(
            f"config.json says architectures {config.get('architectures')!r}, a P-EAGLE head of a kind that is not read; if its layers are "
            f'LLaMA layers, write "architectures": ["{VLLM}"]'
        )
    if config.get("parallel_drafting") not in (None, True):
        raise CheckpointError(
            f"config.json has parallel_drafting {config['parallel_drafting']!r}, but the file a {MASK}: remove one of them"
        )
    return eagle3.read_vllm({key: value for key, value in config.items() if key != "parallel_drafting"}, tensors)


def _mask_token(config: Mapping[str, Any]) -> int:
    """Return the token of a mask. Raise CheckpointError if none is named, or several."""
    tokens = {config[key] for key in TOKENS if is_whole(config.get(key))}
    wrong = [key for key in TOKENS if config.get(key) is not None and not isinstance(config[key], int)]
    if len(tokens) != 1 or wrong or min(tokens) < 0:
        entries = {key: config.get(key) for key in TOKENS if config.get(key) is not None}
        raise CheckpointError(
            f'config.json must name one mask token, like "pard_token": 128255, but has {entries or "none"}'
        )
    return int(tokens.pop())


def _speculative_tokens(config: Mapping[str, Any]) -> Any:
    """Return the number of drafted tokens that the first proposal method names; None if there is no such method."""
    methods = mapping(config, "speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    return first.get("speculative_tokens") if isinstance(first, dict) else None
