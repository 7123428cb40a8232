"""EAGLE-3, P-EAGLE, DFlash, DFlash 2 and DSpark heads for the speculators library and vLLM.

config.json has `speculators_config`, which names the target: `vllm serve FOLDER` then finds it by itself. EAGLE-3 and
P-EAGLE heads always have embed_tokens, because the library's class drafts with zeros for a table that is missing
(transformers initialises it before the target's is read).

The forms: see `speculators`, `peagle` and `speculators_block` of eyas.checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import IDS, MASK, SLIDING, Published
from eyas.errors import CheckpointError
from eyas_train.formats.vllm import publish
from eyas_train.formats.vllm_block import further_parts, write_common, write_tensors

NAME = "speculators"
CLASSES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
}
EXPORTS = tuple(CLASSES)
VERSION = "0.9.0"  # version of the library whose classes the exports fit
TOKENS = 3  # draft tokens of a cycle, unless the engine is told otherwise


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors of the library. Raise CheckpointError for settings that its classes do
    not compute."""
    return (_eagle3 if method in ("eagle3", "peagle") else _block)(method, config, tensors, target)


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which engines run the head."""
    return [f"vllm serve {folder}  # finds {target} by itself", f'SpeculatorModel.from_pretrained("{folder}")']


def _eagle3(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    if not target.name or target.embedding is None:
        raise CheckpointError(
            "a head of this library names its target and has its embeddings: give the target's folder or hub id with --target"
        )
    sent = {name: tensor for name, tensor in tensors.items() if name != MASK}
    if "embed.weight" not in sent:
        sent["embed.weight"] = _narrow(target.embedding(), sent["fc.weight"].dtype)
    ours, layer, their_tensors = publish(config, sent, "layers.0", "speculators", qk_norm=True)
    if ours["qk_norm"]:
        layer["model_type"] = "qwen3"
    if ours["head"] == "target":
        raise CheckpointError("the head uses the target's lm_head, but the library's class has one of its own")
    if ours["target_hidden_size"] != ours["hidden_size"]:
        raise CheckpointError(
            f"the head's hidden size is {ours['hidden_size']} and the target's {ours['target_hidden_size']}: in this library they are equal"
        )
    outer: dict[str, Any] = {name: layer.pop(name) for name in ("torch_dtype", "eyas") if name in layer}
    layer |= {"attention_bias": False, "mlp_bias": False}
    levels = config.get("levels") if method == "peagle" else None
    published = {
        **_config(method, layer, levels or TOKENS, target),
        "draft_vocab_size": ours["draft_vocab_size"],
        IDS: list(ours["feature_layers"]) if ours["feature_layers"] else None,
        **{key: ours[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "norm_output": ours["carries"] == "normed",
        **outer,
    }
    if method == "peagle":
        published["mask_token_id"] = config["mask_token"]
        their_tensors[MASK] = tensors[MASK][None, None]
    return published, their_tensors


def _block(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    if not target.name:
        raise CheckpointError(
            "a head of this library names its target: give the target's folder or hub id with --target"
        )
    windows, causal = config.get("windows") or (), config.get("causal") or ()
    if any(windows) and not config.get("anchored"):
        raise CheckpointError("the head's windows are counted from each slot, but in this library from the root")
    if any(causal) and not any(windows):
        raise CheckpointError(
            "slots of the head see earlier slots only, but in this library only in layers with a window"
        )
    for key, fact in (("embed_scale", "embeddings"), ("logit_scale", "logits")):
        if config.get(key) not in (None, 1.0):
            raise CheckpointError(f"the head's {fact} have a factor, but in this library they have none")
    if config.get("logit_cap"):
        raise CheckpointError("the head's logits are capped, but in this library they are not")
    drafted = config.get("draft_vocab") or config["vocab_size"]
    if "embed.weight" in tensors or ("head.weight" in tensors and drafted == config["vocab_size"]):
        raise CheckpointError("the head has embeddings or an lm_head of its own, but this library takes the target's")
    common = write_common({**config, "windows": (), "causal": (), "draft_vocab": 0}, "")
    not_there = ("architectures", "block_size", "num_target_layers", "sample_from_anchor", "eyas")
    layer = {name: value for name, value in common.items() if name not in not_there}
    if any(windows):
        kinds = [SLIDING if window else "full_attention" for window in windows]
        layer |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": next(filter(None, windows))}
    from_anchor = config["from_anchor"]
    published = {
        **_config(method, layer, config["block"] - (0 if from_anchor else 1), target),
        "draft_vocab_size": drafted,
        "block_size": config["block"],
        "mask_token_id": config["mask_token"],
        "aux_hidden_state_layer_ids": list(config["feature_layers"]),
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": any(windows) and not any(causal),
        **further_parts(method, config),
        **({"eyas": config["eyas"]} if "eyas" in config else {}),
    }
    their_tensors = write_tensors(config, tensors, True)
    if "draft_ids" in their_tensors:
        ids_v = their_tensors.pop("draft_ids")
        their_tensors["d2t"] = ids_v - torch.arange(len(ids_v))
        their_tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids_v, True)
    return published, their_tensors


# --- parts of config.json ----------------------------------------------------------------------------


def _config(method: str, layer: Mapping[str, Any], tokens: int, target: ExportTarget) -> dict[str, Any]:
    """Return the keys that all heads have; `layer` is the config of the layers, `tokens` how many a cycle drafts."""
    inner = dict(layer)
    rope = {"rope_theta": inner.pop("rope_theta"), **(inner.pop("rope_scaling") or {"rope_type": "default"})}
    return {
        "architectures": [CLASSES[method]],
        "speculators_model_type": method,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": {**inner, "rope_parameters": rope},
    }


def _narrow(table_VD: Tensor, head_dtype: torch.dtype) -> Tensor:
    """Return the table in the first dtype that holds it without rounding, the head's own or one of
    16 bits; otherwise unchanged."""
    for dtype in (head_dtype, torch.bfloat16, torch.float16):
        if torch.equal(table_VD.to(dtype).to(table_VD.dtype), table_VD):
            return table_VD.to(dtype)
    return table_VD
