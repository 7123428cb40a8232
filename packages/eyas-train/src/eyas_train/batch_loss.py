"""The loss of one batch, and sums of such losses: the common part of a training step and an evaluation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from eyas.drafters import DraftMethod, Loss
from eyas.errors import EyasError, FitError
from eyas_train.data import Batches
from eyas_train.dist import LossFunction
from eyas_train.features import batch_of

__all__ = ["LossSums", "batch_loss", "batch_memory_errors", "check_finite", "memory_errors"]


class LossSums:
    """Sums over batches: the loss, "count" (how many tokens count), and further sums of the method over those tokens."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        """Add the sums of a loss."""
        for name, value in {"loss": loss.total.detach(), "count": loss.count, **loss.sums}.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def floats(self) -> dict[str, float]:
        """Return the sums, on the host."""
        return {name: float(value) for name, value in self.sums.items()}

    @staticmethod
    def per_token(sums: Mapping[str, float]) -> dict[str, float]:
        """Return means over the tokens that count."""
        count = max(1.0, sums.get("count", 1.0))
        return {name: value / count for name, value in sums.items() if name != "count"}


def batch_loss(
    drafter: DraftMethod,
    loss_function: LossFunction,
    batches: Batches,
    batch: Sequence[int],
    key: tuple[object, ...],
    autocast_dtype: torch.dtype | None,
) -> Loss:
    """Return the loss of one batch.

    Args:
        batch: indices of its examples.
        key: all randomness in the loss follows from it; the random numbers of the process stay as
            they are.
        autocast_dtype: of the forward passes of target and head; None for the dtypes of their weights.

    Raises:
        FitError: out of memory.
    """
    device = drafter.target.device
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    autocast = torch.autocast(device.type, dtype=autocast_dtype) if autocast_dtype else nullcontext()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast:
        torch.manual_seed(seed)
        return loss_function(batch_of(batches, batch, drafter), torch.Generator().manual_seed(seed))


@contextmanager
def memory_errors(cause: str) -> Iterator[None]:
    """Raise FitError that names the cause when the accelerator's memory is too small."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise FitError(f"out of memory {cause}") from error


def batch_memory_errors(batches: Batches, batch: Sequence[int]) -> AbstractContextManager[None]:
    """Return `memory_errors` for the loss of a batch."""
    return memory_errors(
        f"with a batch of {batches.tokens(batch)} tokens; lower batch_tokens (now {batches.batch_tokens})"
    )


def check_finite(value: Tensor | float, step: int) -> None:
    """Raise EyasError if the value is NaN or infinite; `step` counts from 1."""
    if not math.isfinite(value):
        raise EyasError(f"the loss or its gradient became NaN or infinite at step {step}: start again with a lower lr")
