"""The constants of a training run: the drafter, the options, the batches, and the numbers
that follow from them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eyas.drafters import DraftMethod
from eyas.errors import InputError, OptionError
from eyas.targets.fingerprints import fingerprint
from eyas_train._process import has_bf16
from eyas_train.config import TrainConfig
from eyas_train.data import Batches, Example, FeatureReader
from eyas_train.dist import SingleProcess

HALF_DTYPES = (torch.bfloat16, torch.float16)
IDENTITY_NAMES = {
    "method": "method",
    "target": "target model",
    "examples": "training or held-out examples",
    "options": "options of the method",
    "untrained_tensors": "draft vocabulary or embeddings of the head",
}


@dataclass(frozen=True)
class TrainSetup:
    """The constants of a run."""

    drafter: DraftMethod
    net: nn.Module  # the drafter's; trained in float32
    config: TrainConfig
    group: SingleProcess  # or a ProcessGroup, which is one too
    batches: Batches
    heldout_batches: Batches
    total_steps: int
    head_dtype: torch.dtype  # dtype of the published head
    use_bf16: bool  # training steps run under bfloat16 autocast
    identity: Mapping[str, str]  # what a saved state must have been made with, by the keys of IDENTITY_NAMES

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.drafter.target.device

    def check_same_run(self, saved: Mapping[str, Any], path: Path) -> None:
        """Raise OptionError if a saved state is of a run with other settings; the message names
        them."""
        differences = [f"other {name}" for key, name in IDENTITY_NAMES.items() if saved.get(key) != self.identity[key]]
        differences += self.config.differences(saved["config"])
        if differences:
            raise OptionError(
                f"{path} is of a run with other settings: {'; '.join(differences)}; repeat the old ones, or start again without resuming"
            )


def set_up(
    drafter: DraftMethod,
    examples: Sequence[Example],
    heldout: Sequence[Example],
    config: TrainConfig,
    group: SingleProcess,
    read: FeatureReader | None = None,
) -> TrainSetup:
    """Check that these can be trained together, and put the drafter's net into float32.

    Raises:
        OptionError: the method cannot be trained, or not with these options.
        InputError: there are no examples, or one is longer than the target's context.
    """
    method, net = type(drafter).__module__.rpartition(".")[2], drafter.net
    if not drafter.trainable or net is None or not drafter.train_feature_layers:
        raise OptionError(f"the method {method} has nothing to train")
    if not len(examples):
        raise InputError("there are no training examples; give more data")
    head_dtype = next(net.parameters()).dtype
    if head_dtype in HALF_DTYPES:
        net.float()  # updates of a small learning rate would round to nothing
    if drafter.gradient_checkpointing is not None:
        drafter.gradient_checkpointing = config.checkpointing
    elif config.checkpointing:
        raise OptionError(f"checkpointing: the method {method} keeps too little to work it out again; leave it out")
    batches = Batches(examples, config.batch_tokens, config.seed, read)
    longest, context = max(batches.lengths), drafter.target.context
    if longest > context:
        raise InputError(f"an example has {longest} tokens, the target's context {context}: cut the examples there")
    drafter.trained_length = longest
    return TrainSetup(
        drafter=drafter,
        net=net,
        config=config,
        group=group,
        batches=batches,
        heldout_batches=Batches(heldout, config.batch_tokens),
        total_steps=config.total_steps(batches),
        head_dtype=head_dtype,
        use_bf16=config.precision != "float32" and has_bf16(drafter.target.device),
        identity={
            "method": method,
            "target": fingerprint(drafter.target),
            "examples": examples_hash(examples, heldout),
            "options": repr(drafter.options),
            "untrained_tensors": untrained_hash(drafter),
        },
    )


def examples_hash(examples: Sequence[Example], heldout: Sequence[Example]) -> str:
    """Return SHA-256 of the tokens of both sets and of which of them count, in order: a place in the data
    is only valid for the same data.
    """
    digest = hashlib.sha256()
    for part in (examples, heldout):
        for example in part:
            digest.update(array("i", example.ids).tobytes())
            digest.update(bytes(example.counted) + b"|")
        digest.update(b"||")
    return digest.hexdigest()


def untrained_hash(drafter: DraftMethod) -> str:
    """Return SHA-256 of the tensors of the head's checkpoint that are not trained, such as its draft
    vocabulary and its own embeddings.
    """
    assert drafter.net is not None
    trained, digest = set(drafter.net.state_dict()), hashlib.sha256()
    for name, value in sorted(drafter.weights().tensors.items()):
        if name not in trained:
            content = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            digest.update(f"{name}{tuple(value.shape)}".encode() + content)
    return digest.hexdigest()
