"""An evaluation during training: the loss on held-out examples, and figures of the caller's, for
example from decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from eyas.drafters import DraftMethod
from eyas_train.batch_loss import LossSums, batch_loss, batch_memory_errors, check_finite, memory_errors
from eyas_train.setup import HALF_DTYPES, TrainSetup

__all__ = ["MoreFigures", "evaluate_heldout"]

MoreFigures = Callable[[DraftMethod], Mapping[str, float]]


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
        Empty when nothing is held out and there are no further figures.

    Raises:
        EyasError: the loss is NaN or infinite.
        FitError: the memory is too small.
    """
    drafter, group, batches = setup.drafter, setup.group, setup.heldout_batches
    target_dtype = drafter.target.dtype
    autocast_dtype = target_dtype if target_dtype in HALF_DTYPES else None
    setup.net.eval()
    sums, chosen = LossSums(), _chosen_batches(setup)
    own = [item for _, item in group.split(chosen)]
    if setup.config.share_target and len(own) * group.size < len(chosen):
        own.append(chosen[0])  # all processes run the target equally often; it is not counted again
    for number, (key, batch) in enumerate(own):
        with batch_memory_errors(batches, batch):
            loss = batch_loss(drafter, drafter.loss, batches, batch, ("heldout", key), autocast_dtype)
        if number * group.size + group.rank < len(chosen):
            sums.add(loss)
    figures = LossSums.per_token(group.sum_values(sums.floats()))
    check_finite(figures.get("loss", 0.0), step)
    if more_figures is not None:
        with memory_errors("while held-out prompts were decoded"):
            own_figures = dict(more_figures(drafter)) if group.is_first else {}
        figures.update({name: float(value) for name, value in group.broadcast(own_figures).items()})
    return figures


def _chosen_batches(setup: TrainSetup) -> list[tuple[int, list[int]]]:
    """Return the first batches, up to about `heldout_tokens`, each with the number of tokens before it."""
    batches, chosen, tokens = setup.heldout_batches, list[tuple[int, list[int]]](), 0
    for batch in batches.plan(0):
        chosen.append((tokens, batch))
        tokens += batches.tokens(batch)
        if tokens >= setup.config.heldout_tokens:
            break
    return chosen
