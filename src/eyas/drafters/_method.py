"""A drafting method that can be found by name, loaded from a checkpoint, and trained.

Letters: N packed tokens of a training batch, F feature width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.drafter import Drafter
from eyas.core.target import Target

if TYPE_CHECKING:
    from eyas.nn import Documents

__all__ = ["Batch", "DraftMethod", "Loss"]


@dataclass(frozen=True)
class Batch:
    """The input of a training step: documents packed end to end, without padding, with features of
    the frozen target."""

    tokens_N: Tensor  # int64
    features_NF: Tensor  # features of the layers `Drafter.train_feature_layers`, concatenated
    counted_N: Tensor  # bool; the loss mask: True for tokens whose prediction counts (the assistant's tokens)
    documents: Documents


@dataclass(frozen=True)
class Loss:
    """The training loss of a batch, as sums: the training loop adds them over batches and processes
    and divides by the total count."""

    total: Tensor  # scalar with gradient, summed over the tokens that count
    count: Tensor  # scalar; number of tokens that count
    sums: dict[str, Tensor]  # scalars without gradient, summed over the same tokens: figures for the log


class DraftMethod(Drafter):
    """A method: one file of `eyas.drafters`, or a module of somebody else.

    Attributes:
        summary: one line for `eyas methods`.
        needs_weights: whether the method has a net that must be loaded.
        head_format: the value of `Weights.method` in the checkpoints that it loads.
        trainable: whether there is a `loss`.
        train_feature_layers: as `feature_layers`, for `loss`, which may read more.
        trained_length: tokens of the longest sequence that the net was trained on, if known.
        target_fingerprint: fingerprint of the target that the net was trained for, if its checkpoint has one.
        source: the folder or hub id that the weights were loaded from, if they were.
        gradient_checkpointing: whether `loss` recomputes activations in the backward pass; None:
            the method has no such option.
    """

    summary: ClassVar[str] = ""
    needs_weights: ClassVar[bool] = False
    head_format: ClassVar[str] = ""
    trainable: ClassVar[bool] = False
    trained_length: int | None = None
    target_fingerprint: str | None = None
    source: str | Path | None = None
    gradient_checkpointing: bool | None = None

    @property
    def train_feature_layers(self) -> tuple[int, ...]:
        return self.feature_layers

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        """Load the method from `--draft`: the folder or hub id of a head, or None. Some methods override this.

        Raise CheckpointError if there is no such head, or if it does not fit the target.
        """
        if source is None:
            return cls.load(None, target, options)
        weights = checkpoints.load(source)
        with no_init_weights():  # the head's own weights take the place of random ones
            drafter = cls.load(weights if cls.needs_weights or cls.head_format else None, target, options)
        drafter.source = source
        drafter.target_fingerprint = (weights.config.get("eyas") or {}).get("target_fingerprint")
        return drafter

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> DraftMethod:
        """Make the method from weights; raise CheckpointError if they do not fit the target."""
        return cls(target, options)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> DraftMethod:
        """Make the method with random weights: for tests, and as a baseline whose drafts are useless."""
        return cls(target, options)

    @classmethod
    def init_for_training(
        cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None
    ) -> DraftMethod:
        """Make the method with initial weights for training.

        Args:
            counts_V: how often each token counts in the training data, to choose a draft
                vocabulary.
        """
        from eyas import elsewhere  # decoding does without it

        method: DraftMethod = elsewhere.part("losses", "training").new_head(cls, target, options, seed, counts_V)
        return method

    def weights(self) -> Weights:
        """Return the weights and configuration to save as a checkpoint."""
        raise NotImplementedError(f"{type(self).__module__} has no weights to save")

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Return the training loss of a batch; of eyas' own methods the package eyas-train has it. `generator`, on the
        CPU, is the only source of randomness."""
        if not self.trainable:
            raise NotImplementedError(f"{type(self).__module__} cannot be trained")
        from eyas import elsewhere  # decoding does without it

        found: Loss = elsewhere.part("losses", "training").loss(self, batch, generator)
        return found

    def chain(self, depth: int) -> DraftMethod:
        """Return the same net, drafting chains of `depth` tokens: for measuring n-alpha."""
        raise NotImplementedError(f"{type(self).__module__} drafts no chains")
