"""EAGLE-3 heads of the speculators library of the vLLM project: read and exported; P-EAGLE's
exported (`peagle` reads them).

    config.json     speculators_model_type "eagle3"; the layer's LLaMA config under `transformer_layer_config`; beside it
                    draft_vocab_size, target_hidden_size, eagle_aux_hidden_state_layer_ids (index of hidden_states, as ours; null:
                    2, L//2, L-3), norm_before_residual, norm_before_fc, fc_norm, norm_output (the normed state is carried)
    tensors         fc, layers.0.*, norm, lm_head, d2t and t2d, mostly embed_tokens, and input_norm or fc_norm.i

An export also has `speculators_config`, which names the target: `vllm serve FOLDER` then finds it
by itself. It always has embed_tokens, because the library's class drafts with zeros for a table
that is missing (transformers initialises it before the target's is read).

Block heads are read by `speculators_block`, MTP modules by `speculators_mtp`; heads of other types (xpress) and layers
other than LLaMA's and Qwen3's are refused by name. Our config and our tensor names: see `_eagle3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints._eagle3 import CARRIES, IDS, MASK, assemble, choice, is_parallel, layer_ids, refuse
from eyas.checkpoints._eagle3_writing import publish
from eyas.checkpoints._llama import flag, mapping
from eyas.checkpoints._weights import ExportTarget, Published
from eyas.errors import CheckpointError, first_line

__all__ = ["EXPORTS", "NAME", "VERSION", "export", "proposal", "read", "recognises", "usage", "with_defaults"]

NAME, EXPORTS = "speculators", ("eagle3", "peagle")
VERSION = "0.9.0"  # version of the library whose classes the exports fit
OTHERS = ("dflash", "dflash2", "dspark", "mtp")  # read by `speculators_block` and `speculators_mtp`
TOKENS = 3  # draft tokens of a cycle, unless the engine is told otherwise


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether config.json is of the library, and of no head that another module reads."""
    kind = config.get("speculators_model_type")
    return kind is not None and kind not in OTHERS and not is_parallel(config, names)


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return ("eagle3", our config, our tensors) of a published head. A CheckpointError names all that does not fit."""
    kind, layer = config["speculators_model_type"], mapping(config, "transformer_layer_config")
    if kind != "eagle3":
        raise CheckpointError(
            f"this is a head of the speculators type {kind!r}; of that library, heads of types 'eagle3', 'peagle', 'dflash', 'dflash2', "
            "'dspark' and 'mtp' are read"
        )
    if not layer:
        raise CheckpointError("config.json has no transformer_layer_config, which holds the sizes of the layer")
    if layer.get("model_type") not in ("llama", "qwen3"):
        raise CheckpointError(
            f"the layer of this head is of model_type {layer.get('model_type')!r}; heads with a 'llama' or 'qwen3' layer are read"
        )
    is_qwen3 = layer["model_type"] == "qwen3"
    layer = with_defaults(layer, "qwen3") if is_qwen3 else layer
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


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors of the library. Raise CheckpointError for what its class does not compute."""
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
        raise CheckpointError("the head uses the target's lm_head, and the library's class has one of its own")
    if ours["target_hidden_size"] != ours["hidden_size"]:
        raise CheckpointError(
            f"the head's hidden size is {ours['hidden_size']} and the target's {ours['target_hidden_size']}: in this library they are equal"
        )
    dtype, record = layer.pop("torch_dtype"), layer.pop("eyas", None)
    rope = {"rope_theta": layer.pop("rope_theta"), **(layer.pop("rope_scaling") or {"rope_type": "default"})}
    published = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal(TOKENS)],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": {**layer, "rope_parameters": rope, "attention_bias": False, "mlp_bias": False},
        "draft_vocab_size": ours["draft_vocab_size"],
        IDS: list(ours["feature_layers"]) if ours["feature_layers"] else None,
        **{key: ours[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "norm_output": ours["carries"] == "normed",
        "torch_dtype": dtype,
    }
    if method == "peagle":
        published |= {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "mask_token_id": config["mask_token"],
        }
        proposals = [proposal(config.get("levels") or TOKENS)]
        published["speculators_config"] |= {"algorithm": "peagle", "proposal_methods": proposals}
        their_tensors[MASK] = tensors[MASK][None, None]
    return ({**published, "eyas": record} if record else published), their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which engines run the head."""
    return [f"vllm serve {folder}  # finds {target} by itself", f'SpeculatorModel.from_pretrained("{folder}")']


def proposal(tokens: int) -> dict[str, Any]:
    """Return the proposal method of a head that drafts this many tokens in a cycle."""
    return {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}


def with_defaults(layer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the config of a layer, with transformers' defaults for what the library leaves out."""
    from transformers import AutoConfig

    try:
        full: dict[str, Any] = AutoConfig.for_model(**{**layer, "model_type": kind}).to_dict()
    except Exception as error:  # transformers checks the values in its own ways
        raise CheckpointError(f"transformer_layer_config cannot be read: {first_line(error, 200)}") from error
    return {**full, **layer}


def _narrow(table_VD: Tensor, head_dtype: torch.dtype) -> Tensor:
    """Return the table in the first dtype that holds it without rounding, the head's own or one of
    16 bits; otherwise unchanged."""
    for dtype in (head_dtype, torch.bfloat16, torch.float16):
        if torch.equal(table_VD.to(dtype).to(table_VD.dtype), table_VD):
            return table_VD.to(dtype)
    return table_VD
