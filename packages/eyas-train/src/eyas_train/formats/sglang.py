"""EAGLE-1 and EAGLE-3 heads for SGLang, and block heads in their authors' forms, as for vLLM (`vllm_block`).

EAGLE-1 heads have the architecture LlamaForCausalLMEagle and SafeAILab's tensors. SGLang's fc
always has a bias, so an export always writes one, and never the key `bias`, from which SGLang would
give the attention's projections biases that no file fills.

SGLang drafts with the target's embeddings, even if the file has others. The form of EAGLE-3 heads, and why it
holds one layer: see `sglang` of eyas.checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import IDS, SGLANG, Published
from eyas.errors import CheckpointError
from eyas_train.formats import safeailab, vllm_block
from eyas_train.formats.vllm import publish, refuse_qkv_bias

NAME, EXPORTS = "sglang", ("eagle1", "eagle3", *vllm_block.EXPORTS)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors. Raise CheckpointError for settings that SGLang's classes do not compute."""
    if method in vllm_block.EXPORTS:
        return vllm_block.export(method, config, tensors, target)
    sent = _without_table(tensors, target)
    if method == "eagle1":
        return _export_eagle1(config, sent, target)
    ours, published, their_tensors = publish(config, sent, "midlayer", "SGLang")
    if ours["layers"] > 1:
        raise CheckpointError(
            f"the head has {ours['layers']} layers, and versions of SGLang differ in how they compute those after the first"
        )
    if ours["norm_before_residual"]:
        raise CheckpointError(
            "the head's residual is the normed hidden state (norm_before_residual), but SGLang always takes the raw one"
        )
    settings: dict[str, Any] = {key: True for key in ("norm_before_fc", "fc_norm") if ours[key]}
    if ours["carries"] == "normed":
        settings |= {"norm_output": True, "eyas": {**published.get("eyas", {}), "carries": "normed"}}
    if ours["feature_layers"]:
        if ours["feature_layers"][0] == 0:
            raise CheckpointError(
                "the head reads the target's embeddings (hidden_states[0]), but SGLang names layers by their outputs"
            )
        settings["eagle_config"] = {IDS: [k - 1 for k in ours["feature_layers"]], "use_aux_hidden_state": True}
        settings["num_aux_hidden_states"] = ours["num_features"]
    vocabulary = ours["draft_vocab_size"] if ours["head"] == "own" else None
    return {**published, "architectures": [SGLANG], "draft_vocab_size": vocabulary, **settings}, their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which SGLang runs the head."""
    algorithm = {"eagle1": "EAGLE", "dflash2": "DFLASH"}.get(method, method.upper())
    command = f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm}"
    command += f" --speculative-draft-model-path {folder}"
    if method in vllm_block.EXPORTS:
        return [command]
    window = f" --speculative-draft-window-size {config['window']}" if config.get("window") else ""
    return [f"{command} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4{window}"]


def _export_eagle1(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    refuse_qkv_bias(config, "SGLang")
    bias_D = tensors.get("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    published, their_tensors = safeailab.export(
        "eagle1", {**config, "fc_bias": True}, {**tensors, "fc.bias": bias_D}, target
    )
    del published["bias"], published["qkv_bias"]
    return {**published, "architectures": ["LlamaForCausalLMEagle"]}, their_tensors


def _without_table(tensors: Mapping[str, Tensor], target: ExportTarget) -> dict[str, Tensor]:
    """Return the tensors without an embedding table that is the target's, up to the rounding of storage. Raise
    CheckpointError for another one."""
    others = dict(tensors)
    table = others.pop("embed.weight", None)
    if table is None:
        return others
    if target.embedding is None:
        raise CheckpointError(
            "the head has an embedding table, but SGLang drafts with the target's: pass the target with --target, so that they are compared"
        )
    theirs = target.embedding()
    if table.shape != theirs.shape or not torch.allclose(table.float(), theirs, rtol=1e-2, atol=1e-3):
        raise CheckpointError("the head has an embedding table of its own, but SGLang drafts with the target's")
    return others
