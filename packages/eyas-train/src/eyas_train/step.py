"""One training step: the losses of its batches, their gradients, one update of the weights.

All randomness of a batch follows from (seed, step, number of the batch in the step). So a step has
the same result in a run that was interrupted, and in any number of processes up to the rounding of
sums.
"""

from __future__ import annotations

import torch

from eyas_train.batch_loss import LossSums, batch_loss, batch_memory_errors, check_finite
from eyas_train.dist import LossFunction
from eyas_train.features import fetch_ahead
from eyas_train.optim import HeadOptimizer
from eyas_train.setup import TrainSetup
from eyas_train.state import TrainState

__all__ = ["train_step"]


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
        with batch_memory_errors(batches, batch):
            key = (config.seed, state.step, number)
            loss = batch_loss(setup.drafter, loss_function, batches, batch, key, autocast_dtype)
            group.backward(loss.total, is_last=number == own_batches[-1][0])
        sums.add(loss)
    totals = group.sum_values(sums.floats())
    figures = LossSums.per_token(totals)
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
