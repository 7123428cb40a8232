"""dflash2: DFlash 2 (z-lab): DFlash's net with convolutions along the slots of a block, and a selector
that makes children depend on their parent.

    each layer     conv -> attention -> conv, conv -> MLP -> conv: a slot also reads the slots before it in the block
    q at slot i, below a node with token x   =   softmax over the best tokens of logits + <before(x) * W hidden, after(token)>

The selector scores the tokens of the highest logits only; others are not drafted. Trees, sessions and training
are DFlash's; the selector learns at the same time, from the true preceding token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from eyas.blocks._method import BlockMethod, NewBlockHead
from eyas.blocks._net import Extras
from eyas.blocks.method_dflash import TrainBlocks
from eyas.core.options import NEW_HEADS
from eyas.drafters.tools import DynamicTree, check_whole

__all__ = ["Method", "Options"]


@dataclass(frozen=True)
class NewHead(NewBlockHead):
    """The architecture of a head whose training begins. A trained head brings its own."""

    taps: Annotated[int, NEW_HEADS] = 2
    """Slots that a convolution reads."""
    channels: Annotated[int, NEW_HEADS] = 16
    """Channels that share the weights of a convolution."""
    selector_rank: Annotated[int, NEW_HEADS] = 256
    """Width of the selector."""
    candidates: Annotated[int, NEW_HEADS] = 16
    """Tokens that the selector scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(
            "head",
            1,
            taps=self.taps,
            channels=self.channels,
            selector_rank=self.selector_rank,
            candidates=self.candidates,
        )


@dataclass(frozen=True)
class Options:
    """Options of dflash2."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    train: TrainBlocks = field(default_factory=TrainBlocks)
    head: NewHead = field(default_factory=NewHead)


class Method(BlockMethod):
    """DFlash 2 with a dynamic tree."""

    Options: ClassVar[type] = Options
    head_format = "dflash2"
    label = "DFlash 2"
    summary = "DFlash 2: DFlash with convolutions in a block, and children that depend on their parent"

    @classmethod
    def new_extras(cls, options: Any) -> Extras:
        new: NewHead = options.head
        return Extras(taps=new.taps, group=new.channels, selector_rank=new.selector_rank, candidates=new.candidates)
