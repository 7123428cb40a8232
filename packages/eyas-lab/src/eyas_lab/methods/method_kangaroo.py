"""kangaroo: Kangaroo (Liu et al. 2024, arXiv 2404.18911): the target's first layers and a trained adapter draft for the
target.

    embedding -> layers 0 ... exit - 1 of the target -> adapter -> final norm and lm_head of the target -> q

**The adapter** (section 3.2) is a norm and an attention, without an MLP. Here it has the target's own class: it begins as
a copy of layer `exit`, whose MLP is left out. The paper trains a second norm after it; here the target's final norm
stays as it is. The adapter learns the target's distribution at every token (equation 4), by the loss of small_model.

**Double early exiting** (section 3.3): the first exit is after `exit` layers. The second ends drafting after a token to
which the draft gives less than `confidence`.

The draft model is a view of the target (`_skip.py`). Its few layers have a cache of their own, so they read the prompt
again. The paper shares the target's cache and reads the prompt once. Both ways give the same drafts.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from torch import nn

from eyas.checkpoints import Weights
from eyas.core.drafter import Drafter
from eyas.core.options import NEW_HEADS
from eyas.core.target import Target
from eyas.drafters import small_model
from eyas.drafters.tools import check_head, check_whole, load_tensors, random_net, saved_head, target_sizes
from eyas.errors import CheckpointError, ModelError, OptionError
from eyas.targets.placement import is_tensor_parallel
from eyas_lab.methods._skip import ATTENTION, MLP, without

__all__ = ["Method", "Options"]


@dataclass(frozen=True)
class NewAdapter:
    """The architecture of an adapter whose training begins. A trained adapter brings its own."""

    exit: Annotated[int | None, NEW_HEADS] = None
    """Layers of the target before the adapter; none: an eighth of them."""

    def __post_init__(self) -> None:
        if self.exit is not None:
            check_whole("head", 1, exit=self.exit)


@dataclass(frozen=True)
class Options(small_model.DraftOptions):
    """Options of kangaroo."""

    confidence: float = 0.6
    """Nothing is drafted after a token to which the draft gives less probability."""
    head: NewAdapter = field(default_factory=NewAdapter)


class Method(small_model.Method):
    """An early exit of the target, and an adapter."""

    Options: ClassVar[type] = Options
    summary = "Kangaroo: the target's first layers and a trained adapter draft, until a token is uncertain"
    head_format = "kangaroo"

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        super().__init__(target, options, draft)
        self.exit = draft.num_layers - 1
        self.net: nn.Module = draft.family.layers[-1].requires_grad_()

    def for_target(self, target: Target) -> Drafter:
        other = super().for_target(target)
        assert isinstance(other, Method)
        other.draft_model = self.draft_model.with_adapter(target.adapter)
        return other

    @classmethod
    def _view(cls, target: Target, exit_layer: int) -> Target:
        """Return the target's first layers, and a copy of the next one without its MLP in place of the others."""
        if not 1 <= exit_layer < target.num_layers:
            raise OptionError(f"head.exit must be from 1 to {target.num_layers - 1}, got {exit_layer}")
        if is_tensor_parallel(target.model):
            raise ModelError(
                "processes share the target's layers, and none has a whole one to copy: choose another method"
            )
        later = {(k, kind) for k in range(exit_layer + 1, target.num_layers) for kind in (ATTENTION, MLP)}
        view = without(target, frozenset({(exit_layer, MLP), *later}))
        view.family.layers[-1] = deepcopy(view.family.layers[-1])
        return view

    # --- weights

    @classmethod
    def from_pretrained(cls, source: str | Path | None, target: Target, options: Any = None) -> Drafter:
        return super(small_model.Method, cls).from_pretrained(source, target, options)  # an adapter, not a model

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Raise CheckpointError unless the adapter is for a target of these sizes."""
        weights = check_head(weights, cls.head_format, "Kangaroo", target_sizes(target))
        try:
            view = cls._view(target, weights.config["exit"])
        except OptionError as error:
            raise CheckpointError(f"{weights.source}: {error}") from error
        load_tensors(view.family.layers[-1], weights, target)
        return cls(target, options or cls.Options(), view)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        method = cls.init_for_training(target, options)
        random_net(lambda: method.net, target, seed)
        return method

    @classmethod
    def init_for_training(cls, target: Target, options: Any = None, seed: int = 0, counts_V: Any = None) -> Self:
        """Return an adapter that begins as the attention of the layer at which the draft exits."""
        options = options or cls.Options()
        exit_layer = options.head.exit or max(1, target.num_layers // 8)
        return cls(target, options, cls._view(target, exit_layer))

    def weights(self) -> Weights:
        sizes = {"hidden_size": self.target.hidden_size, "vocab_size": self.target.vocab_size}
        return saved_head(self.head_format, {"exit": self.exit, **sizes}, self.net, self.target)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "exit": self.exit}
