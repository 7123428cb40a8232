"""EAGLE-3 heads as SafeAILab, the authors of EAGLE, publish them; eyas writes this format
(docs/reference/head_formats.md). Our config and our tensor names: see `_eagle3`.

This format cannot hold explicit layers of the target, several own layers, norms before fc, a carried normed
state, a bias, or the target's head. A head with one of these is written with the architecture
EyasEagle3ForCausalLM, with its settings under "eyas" and without draft_vocab_size. SGLang and vLLM do not know
this architecture, and the authors' code, which ignores it, stops at the missing draft_vocab_size: no other
reader runs such a head wrongly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints._eagle3 import (
    CARRIES,
    DEEPSPEC,
    IDS,
    NAME_THE_FORM,
    SGLANG,
    VLLM,
    architecture,
    assemble,
    choice,
    dtype_of,
    is_eagle3,
    is_parallel,
    layer_ids,
    publish_tensors,
)
from eyas.checkpoints._llama import flag, mapping, write_layer
from eyas.checkpoints._weights import Published
from eyas.errors import CheckpointError

__all__ = ["EXTENDED", "METHODS", "NEEDS", "read", "recognises", "write"]

METHODS = ("eagle3",)
EXTENDED = "EyasEagle3ForCausalLM"
_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "qk_norm")
NEEDS = (*_FLAGS, "feature_layers", "carries", "head", "layers")  # keys of "eyas" that the published form lacks


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether this is an EAGLE-3 head that no other format claims, even if `read` refuses
    its architecture."""
    claimed = architecture(config) in (SGLANG, VLLM, DEEPSPEC) or "speculators_model_type" in config
    return is_eagle3(config, names) and not claimed and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    eyas, inner = mapping(config, "eyas"), mapping(config, "eagle_config")
    _refuse_other_forms(config, inner, eyas, tensors)
    published = config.get(IDS) if config.get(IDS) is not None else inner.get(IDS)
    draft_vocab_size = config.get("draft_vocab_size")
    if draft_vocab_size is None:
        draft_vocab_size = eyas.get("draft_vocab_size")
    settings = {
        **layer_ids(config, published, None),
        **{key: flag(eyas, key, False) for key in _FLAGS},
        "carries": choice(eyas, "carries", CARRIES),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": draft_vocab_size,
        "head": choice(eyas, "head", ("own", "target")),
    }
    return "eagle3", *assemble(
        {**inner, **config}, tensors, settings, ("midlayer",), eyas, strict=True, several=eyas.get("layers") is not None
    )


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config and tensors of an EAGLE-3 head in the form of SafeAILab."""
    assert method in METHODS, method
    ours, published = publish_tensors(config, tensors, "midlayer")
    return {**_write_config(ours), "torch_dtype": dtype_of(tensors["fc.weight"])}, published


def _refuse_other_forms(
    config: Mapping[str, Any], inner: Mapping[str, Any], eyas: Mapping[str, Any], names: Collection[str]
) -> None:
    """Raise CheckpointError for the architecture, the flags and the layer's name of other formats."""
    name = architecture(config)
    if "eagle3" in name.lower() and name != EXTENDED:
        raise CheckpointError(
            f"config.json says architectures {[name]}, an EAGLE-3 head of a kind that is not read; if its layer is a LLaMA layer, "
            f"name the form that it has: {NAME_THE_FORM}"
        )
    for key in (*_FLAGS, "use_aux_norm", "norm_output"):
        if (config.get(key) or inner.get(key)) and not (key == "norm_output" and eyas.get("carries")):
            raise CheckpointError(
                f"config.json has {key}, which this form of EAGLE-3 heads does not know; name the writer's: {NAME_THE_FORM}"
            )
    if any(name.startswith("layers.0.") for name in names) and not any(name.startswith("midlayer.") for name in names):
        raise CheckpointError(
            f"the layer of this EAGLE-3 head is layers.0, but midlayer in this form; name the writer's: {NAME_THE_FORM}"
        )


def _write_config(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json for our complete config, in the extended form where the published one would define another
    computation."""
    assert ours["feature_layers"] or ours["num_features"] == 3, "other than three features need feature_layers"
    extra: dict[str, Any] = {key: True for key in _FLAGS if ours[key]}
    if ours["layers"] > 1:
        extra["layers"] = ours["layers"]
    if ours["feature_layers"]:
        extra |= {"feature_layers": list(ours["feature_layers"]), "layer_ids": "input"}
        extra |= {"layer_ids_as_published": ours["layer_ids_as_published"]} if ours["layer_ids_as_published"] else {}
    if ours["carries"] != "raw":
        extra["carries"] = ours["carries"]
    if ours["head"] != "own":
        extra["head"] = ours["head"]
    published = write_layer(ours)
    if extra or ours["fc_bias"] or ours["qkv_bias"]:
        published["architectures"] = [EXTENDED]
        extra["draft_vocab_size"] = ours["draft_vocab_size"]
    else:
        published["draft_vocab_size"] = ours["draft_vocab_size"]
    if ours["window"]:
        published |= {"use_sliding_window": True, "sliding_window": ours["window"]}
    if ours["target_hidden_size"] != ours["hidden_size"]:
        published["target_hidden_size"] = ours["target_hidden_size"]
    eyas = {**(ours.get("eyas") or {}), **extra}
    return {**published, "eyas": eyas} if eyas else published
