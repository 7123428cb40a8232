"""dspark: DSpark (arXiv 2607.05147): DFlash's net with a Markov head, which makes children depend
on their parent's token, and a confidence head, which says how far drafting pays.

    q at slot i, below a node with token x   =   softmax(lm_head(hidden of slot i) + after(before(x)))

Slot i (0, 1, ...) predicts the next token, i + 1 places after the root, so a block of n slots
drafts n levels. The Markov head adds a matrix of low rank over pairs of tokens, so that the
children of a node fit that node, at no further pass. The confidence head estimates at each node the
share of q that the target would accept; `--min-confidence` lets nodes below that estimate have no children.

Trees, sessions and training are DFlash's: `_method.py`, `eyas_train.block_loss`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from eyas.blocks._method import BlockMethod, BlockTraining, NewBlockHead
from eyas.blocks._net import BlockNet, Extras
from eyas.blocks.method_dflash import TrainBlocks
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.drafters.tools import DynamicTree, check_choice, check_number, check_weight, check_whole
from eyas.errors import OptionError

__all__ = ["Method", "Options"]


@dataclass(frozen=True)
class NewHead(NewBlockHead):
    """The architecture of a head whose training begins. A trained head brings its own."""

    block: Annotated[int, NEW_HEADS] = 7
    """Slots of a block, the root's included."""
    markov_rank: Annotated[int, NEW_HEADS] = 256
    """Rank of the matrix over pairs of tokens; 0: none."""
    confidence: Annotated[str, NEW_HEADS] = "hidden+markov"
    """Inputs of the confidence head: hidden+markov, hidden, or none (no such head)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("head", 0, markov_rank=self.markov_rank)
        check_choice("head.confidence", self.confidence, ("hidden+markov", "hidden", "none"))
        if self.confidence == "hidden+markov" and not self.markov_rank:
            raise OptionError(
                "head.confidence hidden+markov reads the Markov head, but head.markov_rank is 0: give hidden or none"
            )


@dataclass(frozen=True)
class TrainDSpark(TrainBlocks):
    """How blocks are trained."""

    objective: Annotated[str, TRAINING] = "tokens"
    """Cross-entropy with the tokens of the data, or with the target's distribution (distribution)."""
    cross_entropy: Annotated[float, TRAINING] = 0.1
    """Weight of the cross-entropy."""
    overlap: Annotated[float, TRAINING] = 0.9
    """Weight of the sum of |q - p|."""
    confidence: Annotated[float, TRAINING] = 1.0
    """Weight of the confidence head's loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cross_entropy", "overlap", "confidence"):
            check_weight(f"train.{name}", getattr(self, name))


@dataclass(frozen=True)
class Options:
    """Options of dspark."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    min_confidence: float = 0.0
    """A node gets no children where the confidence head expects less than this share of them to be
    accepted; 0: it is not asked."""
    train: TrainDSpark = field(default_factory=TrainDSpark)
    head: NewHead = field(default_factory=NewHead)

    def __post_init__(self) -> None:
        check_number(
            "min_confidence", self.min_confidence, lambda share: 0 <= share < 1, "a share, 0 or more and below 1"
        )


class Method(BlockMethod):
    """DSpark with a dynamic tree."""

    Options: ClassVar[type] = Options
    head_format = "dspark"
    new_from_anchor = True
    label = "DSpark"
    summary = "DSpark: DFlash with children that depend on their parent, and a confidence head"

    @classmethod
    def new_extras(cls, options: Any) -> Extras:
        return Extras(options.head.markov_rank, options.head.confidence)

    @property
    def training(self) -> BlockTraining:
        """The losses of DSpark: cross-entropy, overlap and confidence, with the weights of the options."""
        train: TrainDSpark = self.options.train
        return train.loss(cross_entropy=train.cross_entropy, overlap=train.overlap, confidence=train.confidence)

    def mask_leaves(self, logits_BQV: Tensor, hidden_B1D: Tensor, tokens_BQ: Tensor) -> Tensor:
        net: BlockNet = self.decoding_net
        if not self.options.min_confidence or net.confidence is None:
            return logits_BQV
        confidence_logit_BQ = net.accepted(hidden_B1D.expand(-1, tokens_BQ.shape[1], -1), tokens_BQ)
        threshold = math.log(self.options.min_confidence / (1 - self.options.min_confidence))
        return logits_BQV.masked_fill((confidence_logit_BQ < threshold)[..., None], -math.inf)
