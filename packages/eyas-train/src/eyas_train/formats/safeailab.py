"""EAGLE-1 and EAGLE-3 heads for their authors' code, which reads eyas' own files, unless the head needs more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget, safeailab, safeailab3
from eyas.checkpoints.tools import Published
from eyas.errors import CheckpointError

NAME, EXPORTS = "safeailab", ("eagle1", "eagle3")


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors. Raise CheckpointError for the heads of EAGLE-1's ablation, which only eyas
    computes, and for EAGLE-3 heads that need more than the published form holds."""
    if method == "eagle1":
        if config["inputs"] != "shifted":
            raise CheckpointError(
                f"the head reads {config['inputs']} inputs, a net of EAGLE-1's ablation, and only eyas computes it"
            )
        return safeailab.write(method, config, tensors)
    published, their_tensors = safeailab3.write(method, config, tensors)
    if published["architectures"] == [safeailab3.EXTENDED]:
        needs = [key for key in safeailab3.NEEDS if published["eyas"].get(key)]
        needs += [name for name in their_tensors if name.endswith("bias")]
        raise CheckpointError(f"SafeAILab's form has no place for settings of this head: {', '.join(needs)}")
    if config.get("window"):
        raise CheckpointError(
            f"the head was trained with a sliding window of {config['window']} tokens, but the authors' code has none: it would show the "
            "head more than it knows"
        )
    return published, their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which the authors' code runs the head."""
    paths = f'base_model_path="{target}", ea_model_path="{folder}"'
    return [f"EaModel.from_pretrained({paths}, use_eagle3={method == 'eagle3'})"]
