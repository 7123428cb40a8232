"""Settings of a model's layers that several runners read."""

from __future__ import annotations

from typing import Any

import torch

from eyas.core.families import FULL, SLIDING
from eyas.core.target import Target

__all__ = ["layer_windows", "norm_eps", "rotary_name"]


def layer_windows(target: Target) -> list[int]:
    """Return the positions that each layer attends to; 0: all."""
    kinds = getattr(target.model.config.get_text_config(decoder=True), "layer_types", None)
    window = target.family.window or 0
    kinds = kinds or [SLIDING if window else FULL] * target.num_layers
    return [
        window if kind == SLIDING else 0 for kind in kinds[: target.num_layers]
    ]  # of a pruned model there may be more


def rotary_name(base: Any) -> str:
    """Return the name of a decoder's module of rotary positions."""
    return "rotary_emb" if hasattr(base, "rotary_emb") else "pos_emb"


def norm_eps(norm: Any) -> float:
    """Return the epsilon of an RMS norm."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
    return torch.finfo(norm.weight.dtype).eps if eps is None else float(eps)  # torch's own norm without a number
