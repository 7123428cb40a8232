"""The optimizer: AdamW for all weights, or Muon for the matrices inside the net and AdamW for the
rest.

Muon (Jordan 2024) makes the update of a matrix orthogonal. Scaled to the size of AdamW's updates
(Liu et al. 2025, arXiv 2502.16982) it takes the same learning rate. It is not meant for tables over
a vocabulary, nor for vectors: those stay with AdamW.

Where heads are fitted before, an update is as small as its matrix (Adafactor, Shazeer and Stern 2018, arXiv 1804.04235,
section 8). A fitted head begins with a matrix of small numbers, which reads features of hundreds, and with one of zeros,
whose output is added to small states. At the learning rate of the others these two make the head worse than it began.

This module knows no method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eyas_train.config import TrainConfig

USUAL_SIZE = 0.03  # root mean square of a matrix's numbers from which on it takes the whole learning rate
LEAST_SHARE = 0.03  # of the learning rate, for a matrix of zeros
VOCABULARY_TABLES = frozenset({"head", "lm_head", "embed", "embed_tokens"})  # names of modules


class HeadOptimizer:
    """The optimizers of a net, whose weights may be shards (DTensors)."""

    def __init__(self, net: nn.Module, config: TrainConfig, device: torch.device, small_updates: bool = False) -> None:
        self.small_updates = small_updates  # of small matrices
        trainable = [(name, value) for name, value in net.named_parameters() if value.requires_grad]
        matrices = [
            value for name, value in trainable if value.ndim == 2 and not VOCABULARY_TABLES & set(name.split("."))
        ]
        for_muon = matrices if config.optimizer == "muon" else []
        muon_ids = {id(value) for value in for_muon}
        self.parameters = [value for _, value in trainable]
        for_adamw = [value for value in self.parameters if id(value) not in muon_ids]
        self.clip = config.clip or math.inf
        self.optimizers: list[torch.optim.Optimizer] = []
        if for_muon:
            muon = torch.optim.Muon(
                [{"params": [value]} for value in for_muon],
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self.optimizers.append(muon)
        if for_adamw:
            fused = device.type in ("cpu", "cuda")
            adamw = torch.optim.AdamW(
                [{"params": [value]} for value in for_adamw],
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=fused,
            )
            self.optimizers.append(adamw)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def scale_and_clip(self, count: float) -> float:
        """Divide all gradients by `count`, the number of tokens that they are sums over, and clip
        them. Returns the norm before clipping.
        """
        torch._foreach_div_([value.grad for value in self.parameters if value.grad is not None], max(1.0, count))
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def step(self, lr: float) -> None:
        """Update the weights."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        shares = [1.0] * len(groups)
        if self.small_updates:
            sizes = torch.stack([_size(group["params"][0]) for group in groups]).tolist()  # read from the device once
            shares = [min(1.0, max(LEAST_SHARE, size / USUAL_SIZE)) for size in sizes]
        for group, share in zip(groups, shares, strict=True):
            group["lr"] = lr * share
        for optimizer in self.optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizers' state by the number of optimizer and parameter and their own name."""
        return {
            f"{number}.{i}.{name}": value
            for number, optimizer in enumerate(self.optimizers)
            for i, entries in optimizer.state_dict()["state"].items()
            for name, value in entries.items()
        }

    def like(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors to read a state into: these, or shards where their parameters are sharded. Raise LookupError
        for other parameters."""
        found = {}
        for key, value in whole.items():
            number, i, _ = key.split(".")
            parameter = [one for group in self.optimizers[int(number)].param_groups for one in group["params"]][int(i)]
            found[key] = torch.zeros_like(parameter) if parameter.shape == value.shape else value
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        for number, optimizer in enumerate(self.optimizers):
            state = dict[int, dict[str, Tensor]]()
            for key, value in tensors.items():
                owner, i, name = key.split(".")
                if int(owner) == number:
                    state.setdefault(int(i), {})[name] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@torch.no_grad()
def _size(value: Tensor) -> Tensor:
    """Return the root mean square of a matrix, which may be a shard; for a vector the usual size."""
    if value.ndim != 2:
        return torch.full((), USUAL_SIZE, dtype=torch.float32, device=value.device)
    norm: Any = value.norm()
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole.float() / math.sqrt(value.numel())
