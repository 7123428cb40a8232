"""EAGLE-3 heads for OpenVINO GenAI, exported: SGLang's form with a table of tokens in every head.

optimum-intel converts SGLang's form. Its class takes d2t from the file for any vocabulary. Where d2t is
missing, because the draft's vocabulary is the target's, it has chance numbers there, and none of the head's
drafts is accepted. So d2t and t2d are always written here. vLLM refuses a d2t of the whole vocabulary, which is
why `sglang` leaves it out. eyas reads the written files as SGLang's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eyas.checkpoints import ExportTarget
from eyas.checkpoints.tools import Published
from eyas.errors import CheckpointError
from eyas_train.formats import sglang

__all__ = ["EXPORTS", "NAME", "export", "usage"]

NAME, EXPORTS = "openvino", ("eagle3",)


def export(method: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: ExportTarget) -> Published:
    """Return config.json and the tensors for optimum-intel. Raise CheckpointError for settings that its class
    does not compute."""
    unknown = {
        "explicit layers": config.get("feature_layers"),
        "norms of its features": config.get("fc_norm") or config.get("norm_before_fc"),
        "a normed state that is carried": config.get("carries") == "normed",
        "a window": config.get("window"),
    }
    if refused := next((name for name, value in unknown.items() if value), None):
        raise CheckpointError(f"the head has {refused}, which optimum-intel's class does not know")
    published, their_tensors = sglang.export(method, config, tensors, target)
    if "lm_head.weight" not in their_tensors:
        raise CheckpointError("the head uses the target's LM head, but optimum-intel's class has one of its own")
    vocabulary, drafted = published["vocab_size"], len(their_tensors["lm_head.weight"])
    if "d2t" not in their_tensors:
        assert drafted == vocabulary
        their_tensors |= {
            "d2t": torch.zeros(vocabulary, dtype=torch.int64),
            "t2d": torch.ones(vocabulary, dtype=torch.bool),
        }
    return {**published, "draft_vocab_size": drafted}, their_tensors


def usage(method: str, config: Mapping[str, Any], folder: str, target: str) -> list[str]:
    """Return lines, of a shell or of Python, by which optimum-intel converts the target and the head."""
    command = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32"
    return [f"{command} --model {target} TARGET_OV", f"{command} --model {folder} --trust-remote-code {folder}_ov"]
