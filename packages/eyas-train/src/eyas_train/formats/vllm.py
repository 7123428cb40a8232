"""EAGLE-1, EAGLE-3 and P-EAGLE heads for vLLM.

EAGLE-1 heads have the architecture EagleLlamaForCausalLM and SafeAILab's tensors without fc.bias,
which vLLM does not compute. With "bias": true, which means a bias of fc to SafeAILab, vLLM gives
the attention's projections biases that no file fills, and nothing that such a head drafts is
accepted. So the bias of fc moves into an embedding table of the head's own: see `bias_into_embedding`.

The forms of EAGLE-3 and P-EAGLE heads: see `eagle3` and `peagle` of eyas.checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget, eagle3, peagle
from eyas.checkpoints.tools import MASK, Published, layer_config, publish_tensors
from eyas.errors import CheckpointError
from eyas_train.formats import safeailab

NAME, EXPORTS = "vllm", ("eagle1", "eagle3", "peagle")
LARGEST_ERROR = 1e-3  # largest error of a bias that was moved into the embeddings, relative to its largest entry


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors. Raise CheckpointError for settings that vLLM's classes do not compute."""
    if method == "eagle1":
        return _export_eagle1(config, tensors, target)
    if method == "eagle3":
        ours, published, their_tensors = publish(config, tensors, "layers.0", "vLLM")
        return {**published, **eagle3.vllm_settings(ours)}, their_tensors
    if len(tensors[MASK]) != 3 * config["hidden_size"]:
        raise CheckpointError(
            "the head's mask has not the features of three layers of the head's own width, which vLLM's class expects"
        )
    return peagle.write(method, config, tensors)


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which vLLM runs the head."""
    kind, tokens = ("eagle" if method == "eagle1" else "eagle3"), "3"
    if method == "peagle":
        tokens = f'{config.get("levels") or 5}, "parallel_drafting": true'
    speculative = f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": {tokens}}}'
    return [f"vllm serve {target} --speculative-config '{speculative}'"]


def _export_eagle1(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    sent = dict(tensors)
    bias = sent.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        table, weight = sent.get("embed.weight"), sent["fc.weight"]
        if table is None:
            if target.embedding is None:
                raise CheckpointError(
                    "the head has a bias of fc, which vLLM's EAGLE-1 does not compute. An embedding table of the head's own can take it: "
                    "pass the target with --target, whose table that one is made from"
                )
            table = target.embedding()
        sent["embed.weight"] = bias_into_embedding(table, weight, bias).to(weight.dtype)
    published, their_tensors = safeailab.export("eagle1", {**config, "fc_bias": False}, sent, target)
    return {**published, "architectures": ["EagleLlamaForCausalLM"]}, their_tensors


def bias_into_embedding(table_VD: Tensor, fc_weight: Tensor, bias_D: Tensor) -> Tensor:
    """Return the embedding table with which an EAGLE-1 head without its bias of fc computes the same.

    fc reads [embedding ; feature]. W is the half of its weight that reads the embedding. A shift s of every
    embedding adds W s, and W s = bias has a solution unless W is singular.

    Args:
        table_VD: the head's own table, or the target's.
        fc_weight: [D, 2D].

    Returns:
        the table [V, D] in float32.

    Raises:
        CheckpointError: no shift solves this, or only one that is much larger than the embeddings.
    """
    W, bias = fc_weight[:, : table_VD.shape[1]].double(), bias_D.double()
    shift = torch.linalg.lstsq(W, bias[:, None]).solution[:, 0]
    error = (W @ shift - bias).abs().max() / bias.abs().max()
    typical = table_VD.double().norm(dim=1).mean()
    if not bool(error < LARGEST_ERROR) or not bool(shift.norm() < 10 * typical):
        raise CheckpointError(
            "the head has a bias of fc, which vLLM's EAGLE-1 does not compute, and no sound shift of its embeddings has the same effect"
        )
    moved_VD: Tensor = (table_VD.double() + shift).float()
    return moved_VD


# --- parts that several formats share


def publish(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], layer: str, reader: str, qk_norm: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Convert to the parts that every format for other engines needs. Raise CheckpointError for biases, which none of
    them computes, and for Qwen3's layers.

    Args:
        layer: the published name of the first layer.
        reader: the engine's name, for messages.
        qk_norm: whether the engine computes Qwen3's layers.

    Returns:
        our complete config, the keys of a LLaMA config.json, and the tensors under their published names.
    """
    ours, published = publish_tensors(config, tensors, layer)
    refuse_qkv_bias(ours, reader)
    if ours["qk_norm"] and not qk_norm:
        raise CheckpointError(
            f"the head has Qwen3's layers, with norms of queries and keys, but {reader} computes LLaMA's"
        )
    if ours["fc_bias"] and bool(published.pop("fc.bias").any()):
        raise CheckpointError(f"the head has a bias of fc, but {reader} computes none in EAGLE-3 heads")
    return ours, layer_config(ours, published), published


def refuse_qkv_bias(config: Mapping[str, Any], reader: str) -> None:
    """Raise CheckpointError if a head has biases of q, k and v; `reader` is an engine that has them only with one of o."""
    if config["qkv_bias"]:
        raise CheckpointError(
            f"the head has biases of q, k and v, but {reader} has them only together with one of o, which the head lacks"
        )
