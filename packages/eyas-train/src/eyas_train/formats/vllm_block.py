"""DFlash, DFlash 2 and DSpark heads in their authors' forms, which eyas saves and vLLM reads. The forms: see `dflash` and
`dspark` of eyas.checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import (
    DFLASH,
    DFLASH2,
    DSPARK,
    SECOND_PARTS,
    SLIDING,
    Published,
    block_names,
    block_shapes,
    differences,
    write_layer,
)  # fmt: skip
from eyas.errors import CheckpointError

NAME = "vllm"
METHODS = EXPORTS = ("dflash", "dflash2", "dspark")


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config.json and the tensors. A table of embeddings of the head's own has no place in DFlash's form."""
    assert method in METHODS, method
    published = write_common(config, {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}[method])
    inner = {"mask_token_id": config["mask_token"], "target_layer_ids": [k - 1 for k in config["feature_layers"]]}
    inner |= further_parts(method, config)
    if method != "dspark":
        return {**published, "dflash_config": inner}, write_tensors(config, tensors, tables=False)
    if not config["markov_rank"]:
        del inner["markov_head_type"]
    return {**published, **inner}, write_tensors(config, tensors, tables=True)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return the result of `write`. Raise CheckpointError for settings that the form cannot hold."""
    if method != "dspark" and not {"embed.weight", "head.weight"}.isdisjoint(tensors):
        raise CheckpointError("the head has embeddings or an lm_head of its own, which heads of DFlash's form have not")
    return write(method, config, tensors)


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which vLLM runs the head."""
    levels = config["block"] - (0 if config["from_anchor"] else 1) if config else 7
    kind = "dspark" if method == "dspark" else "dflash"
    speculative = f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": {levels}}}'
    return [f"vllm serve {target} --speculative-config '{speculative}'"]


# --- parts that several formats share


def write_common(ours: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a Qwen3 config.json, and `sample_from_anchor`; `name` is the class under `architectures`.
    Raise CheckpointError for windows that only the speculators library's form has, and a draft vocabulary."""
    windows, causal, layers = ours.get("windows") or (), ours.get("causal") or (), ours["layers"]
    slides = [window is not None for window in windows] or [False] * layers
    if any(windows) and ours.get("anchored"):
        raise CheckpointError(
            "the head's windows are counted from the root, which only the speculators library's form says"
        )
    if ours.get("draft_vocab"):
        raise CheckpointError("the head has a draft vocabulary, which only the speculators library's form has")
    if causal and len(set(causal)) > 1 and list(causal) != slides:
        raise CheckpointError("some layers of the head see earlier slots only, in a way that this form does not say")
    published = {
        **write_layer(ours),
        "architectures": [name],
        "model_type": "qwen3",
        "attention_bias": False,
        "layer_types": [SLIDING if slid else "full_attention" for slid in slides],
        "num_target_layers": ours["target_layers"],
        "block_size": ours["block"],
        "sample_from_anchor": ours["from_anchor"],
    }
    if any(slides):
        published |= {"use_sliding_window": True, "sliding_window": next(filter(None, windows))}
    if list(causal or [False] * layers) != slides:
        published["is_causal"] = any(causal)
    factors = {"input_embedding_scale": ours.get("embed_scale"), "output_multiplier": ours.get("logit_scale")}
    # without the key a head with a record of eyas has the target's own factor
    plain = (None,) if "eyas" in ours else (None, 1.0)
    published |= {key: factor for key, factor in factors.items() if factor not in plain}
    if ours.get("logit_cap"):
        published["final_logit_softcapping"] = ours["logit_cap"]
    return {**published, "eyas": ours["eyas"]} if "eyas" in ours else published


def further_parts(method: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of DSpark's or DFlash 2's further parts."""
    if method == "dspark":
        return {
            "markov_rank": ours["markov_rank"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": ours["confidence"] != "none",
            "confidence_head_with_markov": ours["confidence"] == "hidden+markov",
        }
    return {theirs: ours[key] for key, theirs in SECOND_PARTS.items()} if method == "dflash2" else {}


def write_tensors(ours: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: bool) -> dict[str, Tensor]:
    """Return our tensors under their published names."""
    faults = differences(tensors, block_shapes(ours, tables), ("embed.weight", "head.weight"))
    assert not faults, faults
    return {name: tensors[our_name] for name, our_name in block_names(ours, tables).items() if our_name in tensors}
