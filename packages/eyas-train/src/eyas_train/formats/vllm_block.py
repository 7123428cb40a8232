"""DFlash, DFlash 2 and DSpark heads in their authors' forms, which eyas saves and vLLM reads. The forms: see `dflash` and
`dspark` of eyas.checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import DFLASH, DFLASH2, DSPARK, Published
from eyas.errors import CheckpointError
from eyas_train.formats._block import further_parts, write_common, write_tensors

__all__ = ["EXPORTS", "METHODS", "NAME", "export", "usage", "write"]

NAME = "vllm"
METHODS = EXPORTS = ("dflash", "dflash2", "dspark")


def write(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Published:
    """Return config.json and the tensors. A table of embeddings of the head's own has no place in DFlash's form."""
    assert method in METHODS, method
    published = write_common(config, {"dflash": DFLASH, "dflash2": DFLASH2, "dspark": DSPARK}[method])
    inner = {"mask_token_id": config["mask_token"], "target_layer_ids": [k - 1 for k in config["feature_layers"]]}
    inner |= further_parts(method, config)
    if method != "dspark":
        return {**published, "dflash_config": inner}, write_tensors(config, tensors, tables=False)
    if not config["markov_rank"]:
        del inner["markov_head_type"]
    return {**published, **inner}, write_tensors(config, tensors, tables=True)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return the result of `write`. Raise CheckpointError for settings that the form cannot hold."""
    if method != "dspark" and not {"embed.weight", "head.weight"}.isdisjoint(tensors):
        raise CheckpointError("the head has embeddings or an lm_head of its own, which heads of DFlash's form have not")
    return write(method, config, tensors)


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which vLLM runs the head."""
    levels = config["block"] - (0 if config["from_anchor"] else 1) if config else 7
    kind = "dspark" if method == "dspark" else "dflash"
    speculative = f'{{"method": "{kind}", "model": "{folder}", "num_speculative_tokens": {levels}}}'
    return [f"vllm serve {target} --speculative-config '{speculative}'"]
