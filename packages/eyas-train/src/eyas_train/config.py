"""The options of a training run, checked, and the numbers that follow from them: learning rate of a
step, number of steps.

Knows no method, no file and no terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eyas.core.params import is_number, is_whole
from eyas.errors import OptionError, near
from eyas_train.data import Batches

CHOICES = {
    "schedule": ("linear", "cosine", "constant"),
    "precision": ("auto", "bf16", "float32"),
    "optimizer": ("adamw", "muon"),
    "parallel": ("fsdp", "ddp"),
}
COUNTS = {  # options that are whole numbers, by their least value
    0: ("warmup_steps", "seed", "eval_every", "save_every", "patience"),
    1: ("steps", "tokens", "accumulation", "heldout_tokens", "log_every"),
    3: ("batch_tokens", "max_length"),
}
TRACKERS = ("tensorboard", "wandb")
# options that a resumed run may change, as the weights do not depend on them
MAY_CHANGE = ("save_every", "log_every", "log", "parallel", "checkpointing")


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run. Raise OptionError for impossible values.

    A step is one update of the weights; it reads `accumulation` batches, however many processes
    share them. The length of a run is given by one of `steps`, `epochs`, `tokens` and `minutes`, one
    epoch if by none. Sources: AdamW's betas and the clipping are EAGLE-1's (section 5); its learning rate of
    3e-5 was for 800,000 steps, shorter runs want a higher one.
    """

    lr: float = 5e-4
    """The highest learning rate, after warm-up."""
    min_lr_share: float = 0.05
    """The last learning rate of the schedule, as a share of lr."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the decay of lr after warm-up."""
    warmup_steps: int | None = None
    """Linear rise to lr. Default: a twentieth of the steps, at most 2,000."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices inside the net, at the same lr; AdamW for all other weights."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    weight_decay: float = 0.0
    """Share of lr by which each update shrinks the weights."""
    clip: float = 0.5
    """Largest norm of the gradient; 0 = no clipping."""
    steps: int | None = None
    """Updates of the weights. Default: one pass over the examples, unless --epochs, --tokens or --minutes is given."""
    epochs: float | None = None
    """Passes over the training examples."""
    tokens: int | None = None
    """Tokens read, padding not counted."""
    minutes: float | None = None
    """Minutes of training by the clock; the learning rate falls with them."""
    batch_tokens: int = 8192
    """Tokens of a batch, padding included."""
    accumulation: int = 1
    """Batches per optimizer step, summed over processes."""
    max_length: int = 2048
    """Longest example in tokens."""
    heldout: float = 0.05
    """Share of the lines to hold out for evaluations."""
    heldout_tokens: int = 50_000
    """Largest number of tokens of an evaluation, roughly."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """bf16: autocast, weights stay float32; auto: where the machine has bf16."""
    checkpointing: bool = False
    """Compute a step's activations again in the backward pass: less memory, more time."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """Several processes (torchrun): each holds a shard of the weights (fsdp), or all of them (ddp).
    """
    seed: int = 0
    """Seed of a new head's weights, the order of the data and the noise in the loss."""
    eval_every: int = 200
    """Steps between evaluations; 0 = at the end only."""
    save_every: int = 200
    """Steps between saved states; 0 = at the end only."""
    log_every: int = 10
    """Steps between lines of the log, each of which is the mean of these steps."""
    patience: int = 0
    """Evaluations without a better held-out loss after which the run ends; 0 = never."""
    log: str = ""
    """Also log to tensorboard, wandb, or both with a comma. Default: log.jsonl only."""

    def __post_init__(self) -> None:
        def require(name: str, is_valid: bool, rule: str) -> None:
            if not is_valid:
                raise OptionError(f"{name} {rule}; got {getattr(self, name)!r}")

        for name in ("lr", "clip", "weight_decay"):
            value = getattr(self, name)
            require(name, is_number(value) and value >= 0, "must be 0 or more")
        require("lr", self.lr > 0, "must be above 0")
        for name in ("min_lr_share", "heldout"):
            value = getattr(self, name)
            require(name, is_number(value) and 0 <= value <= 1, "is a share from 0 to 1")
        require("heldout", self.heldout < 1, "must leave something to train on: below 1")
        are_betas = len(self.betas) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        require("betas", are_betas, "are two numbers from 0 up to, not including, 1")
        for name in ("epochs", "minutes"):
            value = getattr(self, name)
            require(name, value is None or (is_number(value) and value > 0), "must be above 0")
        for least, names in COUNTS.items():
            for name in names:
                value = getattr(self, name)
                is_unset = value is None and name in ("steps", "tokens", "warmup_steps")
                is_count = is_unset or (is_whole(value) and value >= least)
                require(name, is_count, f"must be a whole number, {least} or more")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            require(name, value in choices, f"is unknown; {near(str(value), choices)}")
        require("log", set(self.trackers) <= set(TRACKERS), f"knows {' and '.join(TRACKERS)}")
        require("checkpointing", isinstance(self.checkpointing, bool), "is true or false")
        self._check_lengths()

    def _check_lengths(self) -> None:
        lengths = [name for name in ("steps", "epochs", "tokens", "minutes") if getattr(self, name) is not None]
        if len(lengths) > 1:
            raise OptionError(f"{' and '.join(lengths)} each say how long the training is; give one of them")
        if self.batch_tokens < self.max_length:
            raise OptionError(
                f"batch_tokens is {self.batch_tokens}, less than one example of max_length {self.max_length}; raise it"
            )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in `log`."""
        return tuple(name for name in (part.strip() for part in self.log.split(",")) if name)

    def check_processes(self, count: int) -> None:
        """Raise OptionError if that many processes cannot share the batches of a step evenly, or
        its update.
        """
        if self.accumulation % count:
            raise OptionError(
                f"{count} processes do not divide the {self.accumulation} batches of a step: accumulation must be a multiple of {count}"
            )
        if self.minutes is not None and count > 1:
            raise OptionError("minutes are counted by one process's clock: with several processes give tokens or steps")
        # torch's Muon accepts shards, but rounds sums over them to bfloat16
        if count > 1 and self.optimizer == "muon" and self.parallel == "fsdp":
            raise OptionError(
                "muon works on whole matrices, which no process has with fsdp: with several processes give it parallel ddp"
            )

    def total_steps(self, batches: Batches) -> int:
        """Return the steps of a run with this data; with `minutes` the steps of an epoch, because
        `TrainState.steps` counts by the clock. Raise OptionError when the warm-up would not end."""
        steps = self.steps or max(1, math.ceil(self._batch_count(batches) / self.accumulation))
        if self.warmup_steps is not None and self.warmup_steps >= steps:
            raise OptionError(
                f"warmup_steps is {self.warmup_steps}, the whole training has {steps} steps; lower it or train longer"
            )
        return steps

    def _batch_count(self, batches: Batches) -> int:
        """Return batches of the whole run, from `epochs` or `tokens`."""
        if self.tokens is None:
            epochs = 1.0 if self.epochs is None else self.epochs
            count = sum(len(batches.plan(epoch)) for epoch in range(int(epochs)))
            return count + round((epochs - int(epochs)) * len(batches.plan(int(epochs))))
        count, tokens, position = 0, 0, (0, 0)
        while tokens < self.tokens:
            (batch,), position = batches.take(position, 1)
            count += 1
            tokens += batches.tokens(batch)
        return count

    def lr_at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step (0, 1, ...) of a run of `steps` steps."""
        warmup = min(2000, steps // 20) if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, steps - warmup)
        left = {"linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done), "constant": 1.0}[self.schedule]
        return self.lr * (left if self.schedule == "constant" else self.min_lr_share + (1 - self.min_lr_share) * left)

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences to a saved run's options, for a message; options in MAY_CHANGE are
        left out.
        """
        now = json.loads(json.dumps(asdict(self)))  # as a saved state holds them
        return [
            f"{name} {saved.get(name)!r} there, {value!r} now"
            for name, value in now.items()
            if name not in MAY_CHANGE and saved.get(name) != value
        ]
