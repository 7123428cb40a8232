"""DFlash, DFlash 2 and DSpark heads for SGLang: exported in their authors' forms, as for vLLM (`vllm_block`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas_train.formats.vllm_block import EXPORTS, export

__all__ = ["EXPORTS", "NAME", "export", "usage"]

NAME = "sglang"


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which SGLang runs the head."""
    algorithm = "DSPARK" if method == "dspark" else "DFLASH"
    options = f"--speculative-algorithm {algorithm} --speculative-draft-model-path {folder}"
    return [f"python -m sglang.launch_server --model-path {target} {options}"]
