"""DFlash heads for OpenVINO GenAI, exported: z-lab's form, which optimum-intel converts.

Its class lets all slots of a block see each other in every layer, and drops the first slot: slots predict the token at
their own place. OpenVINO GenAI puts the target's table of embeddings and its lm_head at both ends, as they are.
eyas reads the written files as z-lab's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published
from eyas.errors import CheckpointError
from eyas_train.formats import vllm_block
from eyas_train.formats.openvino import usage

__all__ = ["EXPORTS", "NAME", "export", "usage"]

NAME, EXPORTS = "openvino", ("dflash",)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors for optimum-intel. Raise CheckpointError for settings that its class,
    or OpenVINO GenAI, does not compute."""
    scales = [config.get(name) for name in ("embed_scale", "logit_scale")]
    unknown = {
        "slots that predict the next token": config.get("from_anchor"),
        "layers whose slots see earlier slots only": any(config.get("causal") or ()),
        "windows": any(config.get("windows") or ()),
        "factors of embeddings or logits, or a cap": any(scale not in (None, 1.0) for scale in scales)
        or config.get("logit_cap"),
        "the target's embeddings as one of its features": 0 in config["feature_layers"],
    }
    if refused := next((name for name, value in unknown.items() if value), None):
        raise CheckpointError(f"the head has {refused}, which optimum-intel's class or OpenVINO GenAI does not know")
    return vllm_block.export(method, config, tensors, target)
