"""EAGLE-3 and DFlash heads for OpenVINO GenAI, which optimum-intel converts from SGLang's and z-lab's forms.

**EAGLE-3.** The class takes d2t from the file for any vocabulary. Where d2t is missing, because the draft's vocabulary is
the target's, it has chance numbers there, and none of the head's drafts is accepted. So d2t and t2d are always written
here. vLLM refuses a d2t of the whole vocabulary, which is why `sglang` leaves it out.

**DFlash.** The class lets all slots of a block see each other in every layer, and drops the first slot: slots predict the
token at their own place. OpenVINO GenAI puts the target's table of embeddings and its lm_head at both ends, as they are.

eyas reads the written files as SGLang's and z-lab's forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published
from eyas.errors import CheckpointError
from eyas_train.formats import sglang, vllm_block

NAME, EXPORTS = "openvino", ("eagle3", "dflash")


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors for optimum-intel. Raise CheckpointError for settings that its class,
    or OpenVINO GenAI, does not compute."""
    unknown = _unknown_block(config) if method == "dflash" else _unknown_eagle3(config)
    if refused := next((name for name, value in unknown.items() if value), None):
        also = " or OpenVINO GenAI" * (method == "dflash")
        raise CheckpointError(f"the head has {refused}, which optimum-intel's class{also} does not know")
    if method == "dflash":
        return vllm_block.export(method, config, tensors, target)
    published, their_tensors = sglang.export(method, config, tensors, target)
    if "lm_head.weight" not in their_tensors:
        raise CheckpointError("the head uses the target's LM head, but optimum-intel's class has one of its own")
    vocabulary, drafted = published["vocab_size"], len(their_tensors["lm_head.weight"])
    if "d2t" not in their_tensors:
        assert drafted == vocabulary
        their_tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
        their_tensors["t2d"] = torch.ones(vocabulary, dtype=torch.bool)
    return {**published, "draft_vocab_size": drafted}, their_tensors


def _unknown_eagle3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "explicit layers": config.get("feature_layers"),
        "norms of its features": config.get("fc_norm") or config.get("norm_before_fc"),
        "a normed state that is carried": config.get("carries") == "normed",
        "a window": config.get("window"),
    }


def _unknown_block(config: Mapping[str, Any]) -> dict[str, Any]:
    has_factors = any(config.get(name) not in (None, 1.0) for name in ("embed_scale", "logit_scale"))
    return {
        "slots that predict the next token": config.get("from_anchor"),
        "layers whose slots see earlier slots only": any(config.get("causal") or ()),
        "windows": any(config.get("windows") or ()),
        "factors of embeddings or logits, or a cap": has_factors or config.get("logit_cap"),
        "the target's embeddings as one of its features": 0 in config["feature_layers"],
    }


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which optimum-intel converts the target and the head."""
    command = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
    return [f"{command} --model {target} TARGET_OV", f"{command} --model {folder} --trust-remote-code {folder}_ov"]
