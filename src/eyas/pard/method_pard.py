"""pard: PARD (arXiv 2504.18583): a small language model that was trained on masks drafts all levels of
the tree in one pass.

    unread tokens, root, mask, mask, ...   --the model, causal-->   q of the tokens 1, 2, 3, ... after the root

A mask stands for a token not known yet, so all nodes of a level have the same q, as with DFlash and
P-EAGLE; the tree is EAGLE-2's, grown from these distributions without a further pass, and
deterministic. The model reads the text alone, so one serves every target of its family, fine-tunes
too. A model of PARD-2 (arXiv 2605.08632) may read the features of its own target besides: see
`_session.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from eyas.checkpoints import Weights
from eyas.checkpoints.causal_lm import mask_token_of
from eyas.core.drafter import CycleInput, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters import Batch, Loss, small_model
from eyas.drafters.small_model import NetShape, small_llama
from eyas.drafters.tools import DraftNetSteps, DynamicTree, grow_dynamic, mask_token
from eyas.errors import CheckpointError, OptionError
from eyas.pard._session import FeatureInput, FeatureSession, Session

__all__ = ["Method", "Options"]

CHAIN = small_model.Options(depth=1)  # small_model's own tree, which is not used here


@dataclass(frozen=True)
class Options:
    """Options of pard."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    features: bool = True
    """Let a model of PARD-2 read the target's features, if it was trained for this target's; false: the
    text alone."""
    net: NetShape = field(default_factory=NetShape)

    def __post_init__(self) -> None:
        if not isinstance(self.features, bool):
            raise OptionError(f"features must be true or false, got {self.features!r}")


class Method(small_model.Method):
    """PARD with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "PARD: a small model with a mask token drafts all levels in one pass, for a whole family"
    head_format = "pard"
    trainable = False
    dynamic: DynamicTree

    def __init__(self, target: Target, options: Any, draft: Target) -> None:
        super().__init__(target, CHAIN, draft)
        self.options = options or Options()
        self.dynamic = self.options.tree
        token = mask_token_of(draft.model.config.to_dict())
        if token is None:
            raise CheckpointError(
                f"{draft.name or 'the draft model'} was not trained on masks (its config.json has no pard_token): "
                "it drafts with the method small_model"
            )
        if not 0 <= token < draft.num_embeddings:
            raise CheckpointError(
                f"{draft.name} has the mask token {token}, and there are {draft.num_embeddings} embeddings"
            )
        if draft.family.has_states:
            raise CheckpointError(f"{draft.name} keeps a recurrent state, into which masks cannot go")
        self.mask_token: int = token
        self.feature_input = FeatureInput.of_model(draft, target) if self.options.features else None
        if self.feature_input is not None:
            self.draft_model = draft  # kernels know no added features
            self.feature_layers = self.feature_input.layers

    # --- weights

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        """Return a small LLaMA of the target's vocabulary with random weights."""
        options = options or cls.Options()
        model = small_llama(target, options.net, seed)
        model.config.pard_token = mask_token(None, target, None)
        return cls(target, options, Target(model))

    def weights(self) -> Weights:
        """Return the model in Hugging Face's own layout, without the part of PARD-2."""
        return replace(super().weights(), method=self.head_format)

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows) if self.feature_input is None else FeatureSession(self, rows, self.feature_input)

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        return grow_dynamic(net_steps, cycle_input, self.dynamic)

    def chain(self, depth: int) -> Self:
        options = replace(self.options, tree=replace(self.dynamic, nodes=depth + 1, depth=depth, branch=1))
        return type(self)(self.target, options, self.draft_model)

    def describe(self) -> dict[str, Any]:
        reads = {} if self.feature_input is None else {"features": list(self.feature_layers)}
        return {**self.dynamic.describe(), **reads}

    # --- training

    def loss(self, batch: Batch, generator: Any = None) -> Loss:
        """Raise NotImplementedError: such models are trained by their authors' code."""
        raise NotImplementedError(f"{type(self).__module__} cannot be trained")
