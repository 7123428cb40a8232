"""The options of the training, from the time that is left for it and the text that is there."""

from __future__ import annotations

import math
from typing import Any

from eyas_train.accelerate import plan
from eyas_train.accelerate.plan import Speeds
from eyas_train.data import Batches
from eyas_train.store import FeatureStore

__all__ = ["training_options"]

# learning rate by held-out loss at this hidden size (docs/reference/training.md), less for wider
RATE, RATE_WIDTH = 1e-3, 384
LEAST_RATE_SHARE = 0.02
SAVE_SECONDS = 60.0  # between two saved states


def training_options(store: FeatureStore, speeds: Speeds, seconds: float, max_length: int) -> dict[str, Any]:
    """Return the fields of TrainConfig as "config", the "prompts" of an evaluation, and the "tokens" that will
    be read.

    Args:
        max_length: of the plan; the store may hold shorter examples.
    """
    examples = store.data().train
    available = sum(len(example.ids) for example in examples)
    tokens = plan.training_tokens(seconds, speeds, available)
    batch_tokens = plan.batch_size(tokens, max_length)
    batches = len(Batches(examples, batch_tokens).plan(0))
    steps = max(plan.STEPS[0], round(tokens * batches / available))
    planned = tokens / speeds.train_rate
    config = {
        "minutes": min(seconds, planned * (1 + plan.EVALUATION_SHARE)) / 60,  # by the clock: other programs may begin
        "batch_tokens": batch_tokens,
        "max_length": store.settings.max_length,
        "heldout": store.settings.heldout,
        "lr": RATE * min(1.0, RATE_WIDTH / store.settings.hidden_size),
        "min_lr_share": LEAST_RATE_SHARE,
        "eval_every": math.ceil(steps / plan.EVALUATIONS),
        "save_every": max(1, round(steps * SAVE_SECONDS / planned)),
    }
    return {
        "config": config,
        "prompts": plan.evaluation_prompts(planned, speeds),
        "tokens": tokens,
    }
