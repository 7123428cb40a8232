"""Heads as SGLang serves them: EAGLE-3, also written by SpecForge, ModelOpt and others; EAGLE-1,
exported (`safeailab` reads them).

    config.json     architectures ["LlamaForCausalLMEagle3"], a LLaMA config, draft_vocab_size (null: the target's), `eagle_config` with
                    eagle_aux_hidden_state_layer_ids (the OUTPUT of layer i, so our i + 1; absent: inputs of 2, L//2, L-3) and ModelOpt's
                    flags; bias (of fc, false when absent), target_hidden_size, num_aux_hidden_states, norm_before_fc, norm_before_residual,
                    fc_norm (older: use_aux_norm), norm_output
    tensors         as in SafeAILab's EAGLE-3, or with layers.0 for midlayer; ModelOpt has no t2d; lm_head may be absent where the
                    vocabulary is the target's; fc_norm.i or aux_norm_{low,mid,high}; input_norm; all possibly prefixed with "model."

Heads of several layers are refused, read and written: a version of SGLang computes the layers
after the first without the residual of the one before and norms their input by hidden_norm, vLLM
computes them as plain LLaMA layers, and both know this architecture.

`norm_output` is refused until "eyas" in config.json says which state is carried; exports say it.

EAGLE-1 heads have the architecture LlamaForCausalLMEagle and SafeAILab's tensors. SGLang's fc
always has a bias, so an export always writes one, and never the key `bias`, from which SGLang would
give the attention's projections biases that no file fills.

SGLang drafts with the target's embeddings, whatever the file has. Our config and our tensor names:
see `_eagle3` and `safeailab`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import safeailab
from eyas.checkpoints._eagle3 import IDS, SGLANG, architecture, is_parallel, read_flat
from eyas.checkpoints._eagle3_writing import publish
from eyas.checkpoints._llama import mapping, refuse_qkv_bias
from eyas.checkpoints._weights import ExportTarget, Published
from eyas.errors import CheckpointError

__all__ = ["EXPORTS", "NAME", "export", "read", "recognises", "usage"]

NAME, EXPORTS = "sglang", ("eagle1", "eagle3")
EAGLE1 = "LlamaForCausalLMEagle"

_OLDER = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json names SGLang's class."""
    return architecture(config) == SGLANG and "speculators_model_type" not in config and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    _refuse_two_meanings(config)
    inner = mapping(config, "eagle_config")
    meaning = "output" if inner.get(IDS) is not None else None
    return "eagle3", *read_flat(config, _rename(tensors), meaning, "raw", several=False)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors for SGLang. Raise CheckpointError for what its classes do not compute."""
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
            "the head's residual is the normed hidden state (norm_before_residual), and SGLang always takes the raw one"
        )
    settings: dict[str, Any] = {key: True for key in ("norm_before_fc", "fc_norm") if ours[key]}
    if ours["carries"] == "normed":
        settings |= {"norm_output": True, "eyas": {**published.get("eyas", {}), "carries": "normed"}}
    if ours["feature_layers"]:
        if ours["feature_layers"][0] == 0:
            raise CheckpointError(
                "the head reads the target's embeddings (hidden_states[0]), and SGLang names layers by their outputs"
            )
        settings["eagle_config"] = {IDS: [k - 1 for k in ours["feature_layers"]], "use_aux_hidden_state": True}
        settings["num_aux_hidden_states"] = ours["num_features"]
    vocabulary = ours["draft_vocab_size"] if ours["head"] == "own" else None
    return {**published, "architectures": [SGLANG], "draft_vocab_size": vocabulary, **settings}, their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which SGLang runs the head."""
    algorithm = {"eagle1": "EAGLE"}.get(method, method.upper())
    window = f" --speculative-draft-window-size {config['window']}" if config.get("window") else ""
    return [
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} --speculative-draft-model-path {folder} "
        f"--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4{window}"
    ]


def _export_eagle1(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    refuse_qkv_bias(config, "SGLang")
    bias_D = tensors.get("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    published, their_tensors = safeailab.export(
        "eagle1", {**config, "fc_bias": True}, {**tensors, "fc.bias": bias_D}, target
    )
    del published["bias"], published["qkv_bias"]
    return {**published, "architectures": [EAGLE1]}, their_tensors


def _without_table(tensors: Mapping[str, Tensor], target: ExportTarget) -> dict[str, Tensor]:
    """Return the tensors without an embedding table that is the target's, up to the rounding of storage. Raise
    CheckpointError for another one."""
    others = dict(tensors)
    table = others.pop("embed.weight", None)
    if table is None:
        return others
    if target.embedding is None:
        raise CheckpointError(
            "the head has an embedding table, and SGLang drafts with the target's: name the target with --target, so that they are compared"
        )
    theirs = target.embedding()
    if table.shape != theirs.shape or not torch.allclose(table.float(), theirs, rtol=1e-2, atol=1e-3):
        raise CheckpointError("the head has an embedding table of its own, and SGLang drafts with the target's")
    return others


def _refuse_two_meanings(config: Mapping[str, Any]) -> None:
    norm_output = config.get("norm_output") or mapping(config, "eagle_config").get("norm_output")
    if norm_output and mapping(config, "eyas").get("carries") is None:
        raise CheckpointError(
            "config.json has norm_output, which has two meanings: SpecForge trained with the state before the final norm carried on (until "
            "its pull request 879), SGLang and vLLM carry the normed one; say which by adding "
            '"eyas": {"carries": "raw"} or {"carries": "normed"}'
        )


def _rename(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefix "model.", under the newer names."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix("model.")
        for older, newer in _OLDER.items():
            new = newer + new.removeprefix(older) if new.startswith(older) else new
        if new in out:
            raise CheckpointError(f"the file holds {new} under two names: remove one")
        out[new] = tensor
    return out
