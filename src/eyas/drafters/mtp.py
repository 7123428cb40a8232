"""mtp: the multi-token-prediction module that a target was trained with (Gloeckle et al. 2024, arXiv 2404.19737; DeepSeek-V3, arXiv
2412.19437, section 2.2) drafts for it.

The module's weights are in the target's own checkpoint, so `--draft` may be left out. It reads pairs (feature of token t, token t+1) as
EAGLE's net does, and predicts token t+2; applied again to its own output it predicts on. `_eagle.py` has the session, `_grow.py` grows
the tree, and `_mtp_net.py` wraps transformers' class. Of several modules the first one is applied in all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession
from eyas.core.ops import TreeGrower
from eyas.core.target import Target
from eyas.drafters._eagle import DynamicEagle, EagleSession, Window
from eyas.drafters._grow import DynamicTree
from eyas.drafters._mtp_net import LayoutCache, Net, load_net, random_net
from eyas.drafters._nets import target_layer_shape
from eyas.errors import CheckpointError, ModelError

__all__ = ["Method"]


@dataclass(frozen=True)
class Options:
    """Options of mtp."""

    window: ClassVar[Window] = Window()  # the session asks for it: the module sees everything
    tree: DynamicTree = field(default_factory=DynamicTree)


class Session(EagleSession):
    """EAGLE's session with a cache of the layout of the module's layer."""

    drafter: Method

    def __init__(self, drafter: Method, rows: int) -> None:
        super().__init__(drafter, rows)
        layout = drafter.net.layout(drafter.dtype, drafter.target.device)
        self.cache = LayoutCache(layout, rows, drafter.dtype, drafter.target.device)

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        return None  # the module's layer is the model's code, which may read values on the host


class Method(DynamicEagle):
    """The first MTP module of the target's checkpoint, with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "MTP: the multi-token-prediction module in the target's own checkpoint, dynamic tree by confidence"
    needs_weights = False
    trainable = False
    net: Net

    def __init__(self, target: Target, options: Any, net: Net) -> None:
        super().__init__(target, options)
        if not target.head_is_exact:
            raise ModelError(f"the lm_head of a {target.family.model_type} cannot be applied to drafts: choose another method than mtp")
        self.net, self.shape, self.feature_layers = net, target_layer_shape(target), (target.num_layers,)

    # --- weights

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        """Load the module from `--draft`, or from the target's own checkpoint; CheckpointError if there is none."""
        named = getattr(target.model.config, "name_or_path", "")
        folder = source or (named if named != "None" else "")  # transformers' word for a model that is made from tensors
        if not folder:
            raise CheckpointError("the target was not loaded from a checkpoint with MTP weights: name the one that has them with --draft")
        return cls(target, options, load_net(target, folder))

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Drafter:
        """The module of the target's own checkpoint; there are no heads of this method."""
        return cls.from_pretrained(None, target, options)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        return cls(target, options, random_net(target, seed))

    # --- drafting

    @property
    def any_weight(self) -> Tensor:
        return next(self.net.parameters())

    @cached_property
    def decoding_net(self) -> Net:
        """The net itself: runners have no version of the model's own layers for drafts."""
        return self.net

    @cached_property
    def grower(self) -> TreeGrower | None:
        """None: trees are grown level by level."""
        return None

    @cached_property
    def compiled(self) -> Callable[..., Tensor] | None:
        """None: the net is not compiled."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)

    def chain(self, depth: int) -> Method:
        return Method(self.target, Options(tree=DynamicTree(nodes=depth + 1, depth=depth, branch=1)), self.net)
