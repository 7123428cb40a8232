"""gemma4_assistant: the small models that Google publishes with each Gemma 4 ("assistants") draft
for it.

An assistant is a small Gemma 4 without keys and values of its own: its layers attend to those that
the target has stored for its committed tokens. So it reads no prompt and has no cache. A step reads
a token's embedding, by the target's table, and the hidden of the token before: the target's feature
for the root, its own for the nodes below. All nodes have the root's position, and see no other
node. The format and these rules come from transformers (`Gemma4AssistantForCausalLM`,
`SinglePositionMultiTokenCandidateGenerator`), which drafts chains; here a dynamic tree is grown (EAGLE-2,
section 4). `_assistant_net.py` has the net, `_grow.py` grows the tree.

Letters: B rows, Q nodes of a level, D hidden of the target, d hidden of the assistant, W slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from eyas.checkpoints import Weights
from eyas.core.cache import additive_mask
from eyas.core.drafter import Capturable, CycleInput, DraftSession, TreeSize
from eyas.core.families import SLIDING
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters._assistant_net import Net, SharedKeysValues, load_net, random_net, source_layers
from eyas.drafters._feature_session import FeatureSession
from eyas.drafters._grow import DraftNetSteps, DynamicTree, grow_dynamic
from eyas.drafters._method import DraftMethod
from eyas.drafters._nets import check_head

__all__ = ["Method"]


@dataclass(frozen=True)
class Options:
    """Options of gemma4_assistant."""

    tree: DynamicTree = field(default_factory=DynamicTree)


class Session(FeatureSession):
    """Keeps the target's feature of each row's newest committed token; keys and values are read
    from the target's cache."""

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:  # type: ignore[override]
        return None  # the net's layers are the model's code, which may read values on the host


class Method(DraftMethod):
    """An assistant with a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "Gemma 4's assistants: a small model that reads the target's keys and values, dynamic tree"
    needs_weights = True
    head_format = "gemma4_assistant"
    net: Net

    def __init__(self, target: Target, options: Any, net: Net) -> None:
        super().__init__(target, options)
        self.net, self.feature_layers = net, (target.num_layers,)
        layers = source_layers(target)
        self.layers = {kind: layers.get(kind, max(layers.values())) for kind in dict.fromkeys(net.kinds)}

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        return cls(
            target, options, load_net(check_head(weights, "gemma4_assistant", "Gemma 4's assistants", {}), target)
        )

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        return cls(target, options, random_net(target, seed))

    @property
    def max_tree(self) -> TreeSize | None:
        tree: DynamicTree = self.options.tree
        return tree.size

    def open(self, rows: int) -> DraftSession:
        return Session(rows, self.target, self.grow)

    def grow(self, feature_BD: Tensor, cycle_input: CycleInput) -> Draft:
        """Grow the tree of one cycle from the features of the tokens before the roots."""
        read = partial(self._read, self._seen(cycle_input), cycle_input)

        def expand(tokens_BQ: Tensor, hidden_BQd: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            return read(tokens_BQ, self.net.next_hidden(hidden_BQd))

        net_steps = DraftNetSteps(
            lambda: read(cycle_input.tokens_B[:, None], feature_BD[:, None])[:, 0], self.net.head, expand
        )
        return grow_dynamic(net_steps, cycle_input, self.options.tree)

    def _read(
        self, seen: Mapping[str, SharedKeysValues], cycle_input: CycleInput, tokens_BQ: Tensor, hidden_BQD: Tensor
    ) -> Tensor:
        Q = tokens_BQ.shape[1]
        masked = {kind: each._replace(mask_B1QW=each.mask_B1QW.expand(-1, -1, Q, -1)) for kind, each in seen.items()}
        hidden_BQd: Tensor = self.net(
            hidden_BQD, self.target.embed(tokens_BQ), cycle_input.position_B[:, None].expand(-1, Q), masked
        )
        return hidden_BQd

    def _seen(self, cycle_input: CycleInput) -> dict[str, SharedKeysValues]:
        """Return the keys and values of the committed tokens; in a sliding window, of the last tokens."""
        assert cycle_input.target_cache is not None, "the cycle input needs `target_cache`"
        position_B1, device = cycle_input.position_B[:, None], cycle_input.position_B.device
        seen = {}
        for kind, layer in self.layers.items():
            key_BHWw, value_BHWw = cycle_input.target_cache.read_committed(layer, max(1, cycle_input.max_position))
            slot_W = torch.arange(key_BHWw.shape[2], device=device)
            allowed_BW = slot_W < position_B1
            if kind == SLIDING:  # the newest token and `sliding_window` before it, as transformers' mask shows
                allowed_BW = allowed_BW & (slot_W >= position_B1 - 1 - self.net.text.sliding_window)
            mask_BW = additive_mask(allowed_BW, self.target.dtype)
            # kernels may have rounded them
            key, value = (x_BHWw.to(device, self.target.dtype) for x_BHWw in (key_BHWw, value_BHWw))
            seen[kind] = SharedKeysValues(key, value, mask_BW[:, None, None])
        return seen

    def chain(self, depth: int) -> Method:
        return Method(self.target, Options(tree=DynamicTree(nodes=depth + 1, depth=depth, branch=1)), self.net)

    def describe(self) -> dict[str, Any]:
        tree: DynamicTree = self.options.tree
        return tree.describe()
