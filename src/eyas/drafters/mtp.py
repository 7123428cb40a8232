"""mtp: the multi-token-prediction module that a target was trained with (Gloeckle et al. 2024,
arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437, section 2.2) drafts for it.

The module's weights are in the target's own checkpoint, so `--draft` may be left out. It reads pairs (feature
of token t, token t+1) as EAGLE's net does, and predicts token t+2; applied again to its own output it predicts
on. `_eagle.py` has the session, `_grow.py` grows the tree, `_mtp_net.py` wraps transformers' class, and
computes it by kernels where its layer is LLaMA's. Of several modules the first one is applied in all steps.

Training makes a head of its own: it goes on from the module in the target's checkpoint, or begins
with a new one where there is none. A module that predicted one token while the target was trained
learns here to read its own outputs, by EAGLE-3's training-time test.

Letters: N packed tokens, M slots from which a counted token is predicted, K predictions of all steps,
U target positions (tokens that count), D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import PreTrainedConfig

from eyas.checkpoints import Weights
from eyas.checkpoints.mtp import MODEL_TYPE
from eyas.core.drafter import Capturable, CycleInput, Drafter, DraftSession
from eyas.core.target import Target
from eyas.drafters._eagle import DynamicEagle, EagleSession, Window
from eyas.drafters._grow import DynamicTree
from eyas.drafters._mtp_net import LayoutCache, Net, llama_net, load_net, random_net
from eyas.drafters._nets import check_head, load_tensors, saved_head, target_layer_shape, target_sizes
from eyas.drafters._options import SelfTraining
from eyas.errors import CheckpointError, ModelError

__all__ = ["Method", "Net", "Options", "load_net", "own_checkpoint", "random_net"]


@dataclass(frozen=True)
class Options:
    """Options of mtp."""

    window: ClassVar[Window] = Window()  # the session asks for it: the module sees everything
    tree: DynamicTree = field(default_factory=DynamicTree)
    ttt: SelfTraining = field(default_factory=SelfTraining)


class Session(EagleSession):
    """EAGLE's session; for transformers' layer, with a cache of that layer's layout."""

    drafter: Method

    def __init__(self, drafter: Method, rows: int) -> None:
        super().__init__(drafter, rows)
        if drafter.decoding_net is not drafter.net:
            return
        layout = drafter.net.layout(drafter.dtype, drafter.target.device)
        self.cache = LayoutCache(layout, rows, drafter.dtype, drafter.target.device)

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        return None  # transformers' layer is the model's code, which may read values on the host


class Method(DynamicEagle):
    """The first MTP module of the target's checkpoint, or one that eyas trained, with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "MTP: the multi-token-prediction module in the target's own checkpoint, dynamic tree by confidence"
    head_format = "mtp"
    needs_weights = False
    is_new = False  # a module whose first weights mean nothing yet
    net: Net

    def __init__(self, target: Target, options: Any, net: Net) -> None:
        super().__init__(target, options)
        if not target.head_is_exact:
            raise ModelError(
                f"the lm_head of a {target.family.model_type} cannot be applied to drafts: choose another method than mtp"
            )
        self.net, self.shape, self.feature_layers = net, target_layer_shape(target), (target.num_layers,)

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        """Load the module from `--draft`, a head that eyas trained or a checkpoint with modules, or
        from the target's own checkpoint.

        Raise CheckpointError if there is none."""
        if source is not None and _is_trained_head(source):
            return super().from_pretrained(source, target, options)
        return cls(target, options, load_net(target, source or own_checkpoint(target)))

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Load a module that eyas trained; None for the module of the target's own checkpoint."""
        if weights is None:
            return cls(target, options, load_net(target, own_checkpoint(target)))
        weights = check_head(weights, cls.head_format, "MTP", target_sizes(target))
        theirs, ours = weights.config["target_model_type"], target.family.model_type
        if theirs != ours:
            raise CheckpointError(
                f"{weights.source}: the module has a layer of a {theirs}, but the target is a {ours}: it is for another"
            )
        method = cls(target, options, load_tensors(random_net(target, 0), weights, target))
        method.trained_length = weights.config["max_positions"]
        return method

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        return cls(target, options, random_net(target, seed))

    def weights(self) -> Weights:
        config = {
            "target_model_type": self.target.family.model_type,
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "max_positions": self.trained_length or self.target.context,
        }
        return saved_head(self.head_format, config, self.net, self.target)

    @cached_property
    def decoding_net(self) -> Any:
        """The module by eyas' own layer, where the target's runner has kernels for that; else the
        net itself."""
        own = llama_net(self.net)
        converted = self.net if own is None else self.target.runner.ops.draft_net(own, self.target.draft_weights)
        return self.net if converted is own else converted

    @cached_property
    def compiled(self) -> Callable[..., Tensor] | None:
        """None: the net is not compiled."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)


def own_checkpoint(target: Target) -> str:
    """Return the name of the checkpoint that the target was loaded from; raise CheckpointError if there is none."""
    name = getattr(target.model.config, "name_or_path", "")
    if not name or name == "None":  # transformers' word for a model that is made from tensors
        raise CheckpointError(
            "the target was not loaded from a checkpoint with MTP weights: pass the one that has them with --draft"
        )
    return str(name)


def _is_trained_head(source: str | Path) -> bool:
    """Return whether the source is a module by itself: one that eyas or the speculators library trained, or a file in
    GGUF format. A checkpoint's weights are not fetched for that."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        return Path(source).suffix == ".gguf"
    return config.get("model_type") == MODEL_TYPE or config.get("speculators_model_type") == "mtp"
