"""dflash: DFlash (arXiv 2602.06036): one pass of a small net over a block of masks drafts all
levels of the tree.

    features of the committed tokens (some layers of the target)  --fc, norm-->  keys and values of every layer of the net
    [root, mask, mask, ...]  -->  layers, which see the context and the whole block  -->  target's lm_head  -->  q at each slot

Slot i (1, 2, ...) predicts the token at its own place, i places after the root. A slot does not
know the tokens between, so all nodes of a level have the same q, as with Medusa; the slots see each
other's hidden states, though. The tree is grown level by level by EAGLE-2's rule (`_grow`) from
these distributions, without a further pass. It is deterministic: at any temperature the tokens equal plain
decoding with the same seed.

`_net.py` has the net, `_method.py` the session and the common part with DSpark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from eyas.blocks._method import BlockMethod, BlockTraining, NewBlockHead
from eyas.core.options import TRAINING
from eyas.drafters.tools import DynamicTree, check_choice, check_number, check_whole

__all__ = ["Method", "Options", "TrainBlocks"]

OBJECTIVES, WEIGHTS = ("distribution", "tokens"), ("decay", "pace")


@dataclass(frozen=True)
class TrainBlocks:
    """How blocks are trained."""

    anchors: Annotated[int, TRAINING] = 512
    """Blocks in each example, at most."""
    gamma: Annotated[float, TRAINING] = 4.0
    """A prediction d levels deep weighs exp(-(d - 1) / gamma)."""
    weights: Annotated[str, TRAINING] = "decay"
    """How predictions of a block weigh: less with each level (decay), or as much as they add to the
    accepted length at present (pace: D-PACE)."""
    smoothing: Annotated[float, TRAINING] = 0.5
    """The smoothing of D-PACE, above 0: with 1, levels weigh as if all drafts were accepted; near 0, by the chances
    that the head gives to the data's tokens."""
    objective: Annotated[str, TRAINING] = "distribution"
    """Learn the target's distribution, or the tokens of the data (tokens)."""

    def __post_init__(self) -> None:
        check_whole("train", 1, anchors=self.anchors)
        check_number("train.gamma", self.gamma, lambda gamma: 0 < gamma < math.inf, "a number above 0")
        check_choice("train.weights", self.weights, WEIGHTS)
        check_number("train.smoothing", self.smoothing, lambda share: 0 < share <= 1, "above 0 and at most 1")
        check_choice("train.objective", self.objective, OBJECTIVES)

    def loss(self, **parts: float) -> BlockTraining:
        """Return the weights of the loss; `parts` are those that a method sets itself."""
        smoothing = self.smoothing if self.weights == "pace" else None
        return BlockTraining(self.anchors, self.gamma, smoothing, self.objective, **parts)


@dataclass(frozen=True)
class Options:
    """Options of dflash."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    train: TrainBlocks = field(default_factory=TrainBlocks)
    head: NewBlockHead = field(default_factory=NewBlockHead)


class Method(BlockMethod):
    """DFlash with a dynamic tree."""

    Options: ClassVar[type] = Options
    head_format = "dflash"
    label = "DFlash"
    summary = "DFlash: one pass over a block of masks drafts all levels, dynamic tree"
