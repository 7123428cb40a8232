"""Losses of batches: a training step, which updates the weights once, and an evaluation on held-out examples.

All randomness of a batch follows from (seed, step, number of the batch in the step). So a step has
the same result in a run that was interrupted, and in any number of processes up to the rounding of
sums.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from eyas.drafters import DraftMethod, Loss
from eyas.errors import EyasError, FitError
from eyas_train.data import Batches
from eyas_train.dist import LossFunction
from eyas_train.features import batch_of, fetch_ahead
from eyas_train.optim import HeadOptimizer
from eyas_train.setup import HALF_DTYPES, TrainSetup
from eyas_train.state import TrainState

MoreFigures = Callable[[DraftMethod], Mapping[str, float]]


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


def per_token(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over the tokens that count."""
    count = max(1.0, sums.get("count", 1.0))
    return {name: value / count for name, value in sums.items() if name != "count"}


def train_step(
    setup: TrainSetup, loss_function: LossFunction, optimizer: HeadOptimizer, state: TrainState
) -> dict[str, float]:
    """Update the weights once, and the state with them.

    Args:
        loss_function: the method's loss, of the net as this process holds it.

    Returns:
        The loss and its parts, means over the tokens that count, and "grad_norm", the gradient's
        norm before clipping.

    Raises:
        EyasError: the loss or the gradient is NaN or infinite; nothing was changed.
        FitError: the memory is too small for a batch; nothing was changed.
    """
    config, group, batches = setup.config, setup.group, setup.batches
    step_batches, next_position = batches.take(state.position, config.accumulation)
    own_batches = group.split(step_batches)
    following = group.split(batches.take(next_position, config.accumulation)[0])
    fetch_ahead(batches, [batch for _, batch in own_batches + following], setup.drafter)
    autocast_dtype = torch.bfloat16 if setup.use_bf16 else None
    setup.net.train()
    optimizer.zero_grad()
    sums = LossSums()
    for number, batch in own_batches:
        with _memory_errors(batches, batch):
            key = (config.seed, state.step, number)
            loss = batch_loss(setup.drafter, loss_function, batches, batch, key, autocast_dtype)
            group.backward(loss.total, is_last=number == own_batches[-1][0])
        sums.add(loss)
    totals = group.sum_values(sums.floats())
    figures = per_token(totals)
    check_finite(figures["loss"], state.step + 1)
    group.sum_gradients(optimizer.parameters)
    figures["grad_norm"] = optimizer.scale_and_clip(totals["count"])
    check_finite(figures["grad_norm"], state.step + 1)
    with state.updating():
        optimizer.step(config.lr_at(state.step, state.steps(setup)))
        state.step += 1
        state.position = next_position
        state.tokens += sum(batches.tokens(batch) for batch in step_batches)
    return figures


@torch.no_grad()
def evaluate_heldout(setup: TrainSetup, step: int, more_figures: MoreFigures | None) -> dict[str, float]:
    """Return held-out figures of the net as it is; all processes call this together, with the whole net in
    each.

    The held-out loss and its parts are means over the tokens that count, without dropout, on the
    same batches every time. The forward passes are as exact as the target itself, also where
    training steps use bfloat16.

    Args:
        more_figures: called in the first process only; its result is added.

    Returns:
        The result is empty if no example is held out and no further figure exists.

    Raises:
        EyasError: the loss is NaN or infinite.
        FitError: the memory is too small.
    """
    drafter, group, batches = setup.drafter, setup.group, setup.heldout_batches
    autocast_dtype = drafter.target.dtype if drafter.target.dtype in HALF_DTYPES else None
    setup.net.eval()
    chosen, tokens = list[tuple[int, list[int]]](), 0  # each with the number of tokens before it
    for batch in batches.plan(0):
        if tokens < setup.config.heldout_tokens:
            chosen.append((tokens, batch))
        tokens += batches.tokens(batch)
    sums = LossSums()
    for _, (key, batch) in group.split(chosen):
        with _memory_errors(batches, batch):
            sums.add(batch_loss(drafter, drafter.loss, batches, batch, ("heldout", key), autocast_dtype))
    figures = per_token(group.sum_values(sums.floats()))
    check_finite(figures.get("loss", 0.0), step)
    if more_figures is not None:
        with _memory_errors():
            own_figures = dict(more_figures(drafter)) if group.is_first else {}
        figures.update({name: float(value) for name, value in group.broadcast(own_figures).items()})
    return figures


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
    """
    device = drafter.target.device
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    autocast = torch.autocast(device.type, dtype=autocast_dtype) if autocast_dtype else nullcontext()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast:
        torch.manual_seed(seed)
        return loss_function(batch_of(batches, batch, drafter), torch.Generator().manual_seed(seed))


@contextmanager
def _memory_errors(batches: Batches | None = None, batch: Sequence[int] = ()) -> Iterator[None]:
    """Raise FitError when the accelerator's memory is too small for a batch, or for decoding."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if batches is None:
            raise FitError("out of memory while held-out prompts were decoded") from error
        raise FitError(
            f"out of memory with a batch of {batches.tokens(batch)} tokens; lower batch_tokens (now {batches.batch_tokens})"
        ) from error


def check_finite(value: Tensor | float, step: int) -> None:
    """Raise EyasError if the value is NaN or infinite; `step` counts from 1."""
    if not math.isfinite(value):
        raise EyasError(f"the loss or its gradient became NaN or infinite at step {step}: start again with a lower lr")
