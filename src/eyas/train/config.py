"""What a training run is: its options, checked, and the numbers that follow from them (learning rate of a step, number of steps).

Knows no method, no file and no terminal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from eyas.errors import OptionError, near
from eyas.train.data import Batches

__all__ = ["TrainConfig"]

NAMES = {
    "schedule": ("linear", "cosine", "constant"), "precision": ("auto", "bf16", "float32"), "optimizer": ("adamw", "muon"),
    "parallel": ("fsdp", "ddp"),
}  # fmt: skip
TRACKERS = ("tensorboard", "wandb")
FREE = ("save_every", "log_every", "log", "parallel", "checkpointing")  # may differ when a run is resumed: the weights stay what they are


@dataclass(frozen=True)
class TrainConfig:
    """How a head is trained. OptionError for impossible values.

    A step is one update of the weights; it reads `accumulation` batches, however many processes share them. The length of a run is given
    by one of `steps`, `epochs` and `tokens`, one epoch if by none. Sources: AdamW's betas and the clipping are EAGLE-1's (section 5); its
    learning rate of 3e-5 was for 800,000 steps, shorter runs want a higher one.
    """

    lr: float = 5e-4
    """The highest learning rate, after warm-up."""
    min_lr_share: float = 0.05
    """Where the schedule ends, as a share of lr."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How lr falls after warm-up."""
    warmup_steps: int | None = None
    """Linear rise to lr; None: a twentieth of the steps, at most 2,000."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices inside the net, at the same lr; AdamW for all other weights."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: float = 0.0
    """Share of lr by which each update shrinks the weights."""
    clip: float = 0.5
    """Largest norm of the gradient; 0 = no clipping."""
    steps: int | None = None
    """Updates of the weights."""
    epochs: float | None = None
    """Passes over the training examples."""
    tokens: int | None = None
    """Tokens read, padding not counted."""
    batch_tokens: int = 8192
    """Tokens of a batch, padding included."""
    accumulation: int = 1
    """Batches of a step, of all processes together."""
    max_length: int = 2048
    """Tokens of an example (used by data.read)."""
    heldout: float = 0.05
    """Share of the lines kept apart (used by data.read)."""
    heldout_tokens: int = 50_000
    """Tokens of an evaluation, at most about."""
    precision: Literal["auto", "bf16", "float32"] = "auto"
    """bf16: autocast, weights stay float32; auto: where the machine has bf16."""
    checkpointing: bool = False
    """Work out a step's activations again in the backward: less memory, more time."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """Several processes (torchrun): each holds a part of the weights, or all of them."""
    seed: int = 0
    """Of a new head's weights, the order of the data and the noise in the loss."""
    eval_every: int = 200
    """Steps between evaluations; 0 = at the end only."""
    save_every: int = 200
    """Steps between saved states; 0 = at the end only."""
    log_every: int = 10
    """Steps that a line of the log is the mean of."""
    patience: int = 0
    """Evaluations without a better held-out loss after which the run ends; 0 = never."""
    log: str = ""
    """Where else than log.jsonl the losses go: tensorboard, wandb, or both with a comma."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "weight_decay"):
            _require(_number(getattr(self, name)) and getattr(self, name) >= 0, name, "must be 0 or more", self)
        _require(self.lr > 0, "lr", "must be above 0", self)
        for name in ("min_lr_share", "heldout"):
            _require(_number(getattr(self, name)) and 0 <= getattr(self, name) <= 1, name, "is a share from 0 to 1", self)
        _require(self.heldout < 1, "heldout", "must leave something to train on: below 1", self)
        good_betas = len(self.betas) == 2 and all(_number(beta) and 0 <= beta < 1 for beta in self.betas)
        _require(good_betas, "betas", "are two numbers from 0 up to, not including, 1", self)
        _require(self.epochs is None or (_number(self.epochs) and self.epochs > 0), "epochs", "must be above 0", self)
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            optional = value is None and name in ("steps", "tokens", "warmup_steps")
            _require(optional or (_whole(value) and value >= least), name, f"must be a whole number, {least} or more", self)
        for name, known in NAMES.items():
            value = getattr(self, name)
            _require(value in known, name, f"is unknown; {near(str(value), known)}", self)
        for tracker in self.trackers:
            _require(tracker in TRACKERS, "log", f"knows {' and '.join(TRACKERS)}", self)
        _require(isinstance(self.checkpointing, bool), "checkpointing", "is true or false", self)
        self._check_lengths()

    def _check_lengths(self) -> None:
        given = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} each say how long the training is; give one of them")
        if self.batch_tokens < self.max_length:
            raise OptionError(f"batch_tokens is {self.batch_tokens}, less than one example of max_length {self.max_length}; raise it")

    @property
    def trackers(self) -> tuple[str, ...]:
        return tuple(name for name in (part.strip() for part in self.log.split(",")) if name)

    def check_processes(self, count: int) -> None:
        """OptionError when that many processes cannot share a step's batches evenly, or its update."""
        if self.accumulation % count:
            raise OptionError(
                f"{count} processes do not divide the {self.accumulation} batches of a step: accumulation must be a multiple of {count}"
            )
        if count > 1 and (self.optimizer, self.parallel) == (
            "muon",
            "fsdp",
        ):  # torch's works on shards, but rounds sums of them to bfloat16
            raise OptionError("muon works on whole matrices, which no process has with fsdp: with several processes give it parallel ddp")

    def total_steps(self, batches: Batches) -> int:
        """How many steps the run has with this data; OptionError when warm-up would not end."""
        steps = self.steps if self.steps is not None else max(1, math.ceil(self._batch_count(batches) / self.accumulation))
        if self.warmup_steps is not None and self.warmup_steps >= steps:
            raise OptionError(f"warmup_steps is {self.warmup_steps}, the whole training has {steps} steps; lower it or train longer")
        return steps

    def _batch_count(self, batches: Batches) -> int:
        """Batches of the whole run, from `epochs` or `tokens`."""
        count, epoch = 0, 0
        if self.tokens is not None:
            left = self.tokens
            while left > 0:
                for batch in batches.plan(epoch):
                    count, left = count + 1, left - batches.tokens(batch)
                    if left <= 0:
                        break
                epoch += 1
        else:
            epochs = 1.0 if self.epochs is None else self.epochs
            count = sum(len(batches.plan(epoch)) for epoch in range(int(epochs)))
            count += round((epochs - int(epochs)) * len(batches.plan(int(epochs))))
        return count

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of a step (0, 1, ...) of a run of `steps`."""
        warmup = min(2000, steps // 20) if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, steps - warmup)
        left = {"linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done), "constant": 1.0}[self.schedule]
        return self.lr * (left if self.schedule == "constant" else self.min_lr_share + (1 - self.min_lr_share) * left)

    def differences(self, then: dict[str, Any]) -> list[str]:
        """Where a saved run's options differ, for a message; those of `FREE` may."""
        now = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in FREE}
        now["betas"], then = list(self.betas), {**then, "betas": list(then.get("betas", ()))}
        return [f"{name} {then.get(name)!r} there, {value!r} now" for name, value in now.items() if then.get(name) != value]


_WHOLE = {
    "steps": 1, "tokens": 1, "warmup_steps": 0, "batch_tokens": 3, "accumulation": 1, "max_length": 3, "heldout_tokens": 1, "seed": 0,
    "eval_every": 0, "save_every": 0, "log_every": 1, "patience": 0,
}  # fmt: skip


def _require(good: bool, name: str, what: str, config: TrainConfig) -> None:
    if not good:
        raise OptionError(f"{name} {what}; got {getattr(config, name)!r}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
