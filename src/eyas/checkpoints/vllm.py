"""Heads in vLLM's own format: EAGLE-3, read and exported; EAGLE-1, exported (`safeailab` reads them).

    config.json     architectures ["Eagle3LlamaForCausalLM"], a LLaMA config, draft_vocab_size; eagle_aux_hidden_state_layer_ids beside it
                    or in `eagle_config` (the INPUT of layer i, as ours; absent: 2, L//2, L-3); target_hidden_size, norm_before_fc,
                    norm_before_residual, fc_norm, norm_output (the normed state is carried)
    tensors         as in SafeAILab's EAGLE-3, or with layers.0 for midlayer; lm_head may be absent where the vocabulary is the
                    target's; t2d is optional, and checked where it exists; fc_norm.i, input_norm; layers.i from 1 on are LLaMA layers
                    over hidden states; their hidden_norm, which vLLM loads and does not use, may be there

EAGLE-1 heads have the architecture EagleLlamaForCausalLM and SafeAILab's tensors without fc.bias,
which vLLM does not compute. With "bias": true, which means a bias of fc to SafeAILab, vLLM gives
the attention's projections biases that no file fills, and nothing that such a head drafts is
accepted. An export moves the bias of fc into an embedding table of the head's own: see
`bias_into_embedding`.

Our config and our tensor names: see `_eagle3` and `safeailab`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import safeailab
from eyas.checkpoints._eagle3 import IDS, VLLM, architecture, is_parallel, read_flat
from eyas.checkpoints._eagle3_writing import publish
from eyas.checkpoints._llama import flag, mapping
from eyas.checkpoints._weights import ExportTarget, Published
from eyas.errors import CheckpointError

__all__ = ["EXPORTS", "NAME", "bias_into_embedding", "export", "read", "recognises", "usage"]

NAME, EXPORTS = "vllm", ("eagle1", "eagle3")
EAGLE1 = "EagleLlamaForCausalLM"
LARGEST_ERROR = 1e-3  # largest error of a bias that was moved into the embeddings, relative to its largest entry


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names vLLM's class of EAGLE-3 heads."""
    return architecture(config) == VLLM and "speculators_model_type" not in config and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    normed = flag(config, "norm_output", False) or flag(mapping(config, "eagle_config"), "norm_output", False)
    return "eagle3", *read_flat(config, _without_unused(tensors), "input", "normed" if normed else "raw")


def _without_unused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the norms that vLLM's class loads for layers after the first, and
    does not use."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)
    }


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors for vLLM. Raise CheckpointError for what its classes do not compute."""
    if method == "eagle1":
        return _export_eagle1(config, tensors, target)
    ours, published, their_tensors = publish(config, tensors, "layers.0", "vLLM")
    settings: dict[str, Any] = {key: True for key in ("norm_before_fc", "fc_norm", "norm_before_residual") if ours[key]}
    if ours["carries"] == "normed":
        settings["norm_output"] = True
    if ours["target_hidden_size"] != ours["hidden_size"]:
        settings["target_hidden_size"] = ours["target_hidden_size"]
    if ours["feature_layers"]:
        settings |= {IDS: list(ours["feature_layers"]), "num_aux_hidden_states": ours["num_features"]}
    settings = {"architectures": [VLLM], "draft_vocab_size": ours["draft_vocab_size"], **settings}
    return {**published, **settings}, their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which vLLM runs the head."""
    kind = {"eagle1": "eagle"}.get(method, method)
    speculative = f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": 3}}'
    return [f"vllm serve {target} --speculative-config '{speculative}'"]


def _export_eagle1(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    sent = dict(tensors)
    bias = sent.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        table, weight = sent.get("embed.weight"), sent["fc.weight"]
        if table is None:
            if target.embedding is None:
                raise CheckpointError(
                    "the head has a bias of fc, which vLLM's EAGLE-1 does not compute; an embedding table of the head's own can take it: "
                    "name the target with --target, whose table that one is made from"
                )
            table = target.embedding()
        sent["embed.weight"] = bias_into_embedding(table, weight, bias).to(weight.dtype)
    published, their_tensors = safeailab.export("eagle1", {**config, "fc_bias": False}, sent, target)
    return {**published, "architectures": [EAGLE1]}, their_tensors


def bias_into_embedding(table_VD: Tensor, fc_weight: Tensor, bias_D: Tensor) -> Tensor:
    """Return the embedding table with which an EAGLE-1 head without its bias of fc computes the same.

    fc reads [embedding ; feature]. So the half W of its weight that reads the embedding takes a
    shift s of every embedding to W s, and W s = bias has a solution unless W is singular.

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
