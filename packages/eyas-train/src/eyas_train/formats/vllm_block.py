"""DFlash, DFlash 2 and DSpark heads for vLLM: exported in their authors' forms, which it reads (`dflash`,
`dspark`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget, dflash, dspark
from eyas.checkpoints.tools import Published
from eyas.errors import CheckpointError

__all__ = ["EXPORTS", "NAME", "export", "usage"]

NAME, EXPORTS = "vllm", ("dflash", "dflash2", "dspark")


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors. Raise CheckpointError for what the form cannot say."""
    if method != "dspark" and not {"embed.weight", "head.weight"}.isdisjoint(tensors):
        raise CheckpointError("the head has embeddings or an lm_head of its own, which heads of DFlash's form have not")
    if method == "dspark":
        return dspark.write(method, config, tensors)
    return dflash.write(method, config, tensors)


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which vLLM runs the head."""
    levels = config["block"] - (0 if config["from_anchor"] else 1) if config else 7
    kind = "dspark" if method == "dspark" else "dflash"
    speculative = f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": {levels}}}'
    return [f"vllm serve {target} --speculative-config '{speculative}'"]
