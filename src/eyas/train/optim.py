"""How gradients become new weights: AdamW for all of them, or Muon for the matrices inside the net and AdamW for the rest.

Muon (Jordan 2024) makes the update of a matrix orthogonal. Scaled to the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982) it
takes the same learning rate. It is not for tables over a vocabulary, nor for vectors: those stay with AdamW. Knows no method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.train.config import TrainConfig

__all__ = ["Optimiser"]

TABLES = frozenset({"head", "lm_head", "embed", "embed_tokens"})  # names of modules whose weights are tables over a vocabulary


class Optimiser:
    """Of a net's weights, which may be in shards (DTensors)."""

    def __init__(self, net: nn.Module, config: TrainConfig, device: torch.device) -> None:
        named = [(name, value) for name, value in net.named_parameters() if value.requires_grad]
        self.parameters = [value for _, value in named]
        self.clip, self.parts = config.clip or math.inf, list[torch.optim.Optimizer]()
        inner = [value for name, value in named if config.optimizer == "muon" and value.ndim == 2 and not TABLES & set(name.split("."))]
        taken = {id(value) for value in inner}
        outer = [value for value in self.parameters if id(value) not in taken]
        if inner:
            muon = torch.optim.Muon(inner, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if outer:
            fused = device.type in ("cpu", "cuda")
            adamw = torch.optim.AdamW(outer, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused)
            self.parts.append(adamw)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def scale_and_clip(self, count: float) -> float:
        """Divide all gradients by what counted; their norm before it is clipped."""
        torch._foreach_div_([value.grad for value in self.parameters if value.grad is not None], max(1.0, count))
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def state(self, whole: Callable[[Tensor], Tensor]) -> list[dict[str, Any]]:
        """What resuming needs; `whole` makes a tensor of a shard."""
        return [_mapped(part.state_dict(), lambda i, value: whole(value)) for part in self.parts]

    def load(self, states: Sequence[dict[str, Any]], shard_like: Callable[[Tensor, Tensor], Tensor]) -> None:
        """`shard_like(value, parameter)`: the part of a whole tensor that belongs to this process, if the parameter is in shards."""
        for part, state in zip(self.parts, states, strict=True):
            parameters = [value for group in part.param_groups for value in group["params"]]

            def placed(i: int, value: Tensor, parameters: list[Tensor] = parameters) -> Tensor:
                return shard_like(value, parameters[i]) if value.shape == parameters[i].shape else value

            part.load_state_dict(_mapped(state, placed))


def _mapped(state: dict[str, Any], change: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """An optimiser's state with its tensors changed; the number is that of their parameter."""
    inner = {
        i: {name: change(i, value) if isinstance(value, Tensor) else value for name, value in entries.items()}
        for i, entries in state["state"].items()
    }
    return {**state, "state": inner}
