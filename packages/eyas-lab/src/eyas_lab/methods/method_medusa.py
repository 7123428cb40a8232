"""medusa: Medusa-1 (Cai et al. 2024, arXiv 2401.10774): more heads besides the target's own, each
for a token further ahead.

Head k (0, 1, ...) reads the target's final feature of the newest committed token t. The target's own head
predicts token t+1 from it, which is the root; head k predicts token t+2+k:

    feature of t  ->  blocks: x + SiLU(W x + b)  ->  lm_head of its own (or the target's)  ->  q of token t+2+k

A head does not know the tokens in between. So the children of all nodes of a level are the same best tokens,
and the tree is a product of ranked lists. The likely part of it is kept: a static part (section 2.3.3), or in
each cycle the paths with the largest products of probabilities. Trees are
deterministic: at any temperature the tokens equal plain decoding with the same seed. With coupled noise
(`_grow`) they are ranked by their chance to be this run's draw. The paper's typical acceptance is lossy and not here.

Letters: B rows, K heads, D hidden, V vocabulary, M positions that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.checkpoints import Weights
from eyas.core.drafter import CycleInput, DraftSession, TreeSize
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters import Batch, DraftMethod, Loss
from eyas.drafters.tools import (
    DraftNetSteps,
    FeatureSession,
    check_choice,
    check_head,
    load_tensors,
    place_net,
    saved_head,
    seeded,
    target_sizes,
)
from eyas_lab.methods._heads import OBJECTIVES, HeadCount, HeadsTree, HeadTreeOptions, heads_loss, lm_head_like

__all__ = ["Method", "Net", "ResBlock"]

DECAY = 0.8  # each further head weighs less in the loss (section 2.2)


@dataclass(frozen=True)
class NewHeads(HeadCount):
    """The architecture of heads whose training begins. Trained heads bring their own."""

    output: Annotated[Literal["own", "target"], NEW_HEADS] = "own"
    """Lm_heads of their own, which are trained, or the target's for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("head.output", self.output, ("own", "target"))


@dataclass(frozen=True)
class Options:
    """Options of medusa."""

    tree: HeadTreeOptions = field(default_factory=HeadTreeOptions)
    head: NewHeads = field(default_factory=NewHeads)
    objective: Annotated[str, TRAINING] = "tokens"
    """A head learns from the tokens of the data (tokens), or from the target's distribution
    (distribution)."""

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)


# --- the net


class ResBlock(nn.Linear):
    """x + SiLU(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the block's change."""
        return x + F.silu(super().forward(x))


class Net(nn.Module):
    """The heads."""

    def __init__(self, hidden_size: int, vocab_size: int | None, heads: int, blocks: int) -> None:
        """vocab_size: outputs of the heads' own lm_heads; None if they use the target's."""
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size, hidden_size) for _ in range(blocks))) for _ in range(heads)
        )
        self.lm_head = (
            nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(heads)) if vocab_size else None
        )

    def forward(self, features: Tensor, k: int) -> Tensor:
        """Return the input of head k's lm_head, [..., D], for the target's final features [..., D]."""
        hidden: Tensor = self.blocks[k](features)
        return hidden

    def output(self, k: int) -> Tensor | None:
        """Return head k's own lm_head [V, D]; None if it uses the target's."""
        return None if self.lm_head is None else self.lm_head[k].get_parameter("weight")


# --- the method


class Method(DraftMethod):
    """Medusa-1 on the frozen target."""

    Options: ClassVar[type] = Options
    summary = "Medusa: several heads on one feature, each a token further ahead, tree of ranks"
    needs_weights = True
    trainable = True
    head_format = "medusa"
    net: Net

    def __init__(self, target: Target, options: Any, net: Net) -> None:
        super().__init__(target, options)
        self.net = net
        self.feature_layers = (target.num_layers,)
        self.heads = len(net.blocks)
        self.tree = HeadsTree(self.options.tree, self.heads, target)

    @classmethod
    def new_head_layers(cls, target: Target, options: Any) -> tuple[int, ...]:
        """Return the `train_feature_layers` of new heads, without making them."""
        return (target.num_layers,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the heads' weights."""
        return next(self.net.parameters()).dtype

    @property
    def max_tree(self) -> TreeSize | None:
        return self.tree.max_tree

    # --- weights

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Load heads. Raise CheckpointError unless width and vocabulary are the target's, and all tensors and no
        others are there."""
        weights = check_head(weights, cls.head_format, cls.head_format, target_sizes(target))
        config = weights.config
        own_size = target.vocab_size if config["output"] == "own" else None
        net = Net(target.hidden_size, own_size, config["heads"], config["blocks"])
        return cls(target, options or cls.Options(), load_tensors(net, weights, target))

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        options = options or cls.Options()
        new = options.head
        with seeded(seed, target.device):
            net = Net(target.hidden_size, target.vocab_size if new.output == "own" else None, new.count, new.blocks)
            for weight in net.parameters():
                nn.init.normal_(weight, std=target.hidden_size**-0.5)
        return cls(target, options, place_net(net, target))

    @classmethod
    def init_for_training(
        cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None
    ) -> Self:
        """Return heads that begin as the target's own: blocks that add nothing, then a copy of its lm_head (section
        2.2)."""
        method = cls.random(target, options, seed)
        with torch.no_grad():
            for weight in method.net.blocks.parameters():
                weight.zero_()
            for k in range(method.heads):
                if (lm_head := method.net.output(k)) is not None:
                    lm_head.copy_(lm_head_like(target, lm_head))
        return method

    def weights(self) -> Weights:
        net = self.net
        config = {
            "heads": self.heads,
            "blocks": len(list(net.blocks[0].children())),
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size if net.lm_head else None,
            "output": "own" if net.lm_head else "target",
            "base_model": self.target.name,
        }
        return saved_head(self.head_format, config, net, self.target)

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return FeatureSession(rows, self.target, self.grow)

    def logits(self, feature_BD: Tensor, heads: int) -> Tensor:
        """Return the logits [B, K, V] of the first `heads` heads."""
        net: Net = self.decoding_net
        hidden_BKD = torch.stack([net(feature_BD.to(self.dtype), k) for k in range(heads)], dim=1)
        if net.lm_head is None:
            return self.target.head(hidden_BKD.to(self.target.dtype))
        return torch.stack([net.lm_head[k](hidden_BKD[:, k]) for k in range(heads)], dim=1)

    def grow(self, feature_BD: Tensor, cycle_input: CycleInput) -> Draft:
        """Return the tree below the roots: at level k, the best tokens of head k."""
        logits_BKV, level = self.logits(feature_BD, self.tree.depth), 0

        def head(hidden_BQ1: Tensor) -> Tensor:
            return logits_BKV[:, level, None].expand(-1, hidden_BQ1.shape[1], -1)

        def expand(tokens_BQ: Tensor, hidden_BQ1: Tensor, visible: Tensor, above: int) -> Tensor:
            nonlocal level
            level = above + 1
            return hidden_BQ1

        # a node has no state of its own, so any number stands for it
        return self.tree.grow(DraftNetSteps(lambda: logits_BKV[:, 0, :1], head, expand), cycle_input)

    def chain(self, depth: int) -> Method:
        """Return the method with a chain, at most as deep as there are heads."""
        return Method(self.target, Options(tree=HeadTreeOptions(f"chain-{min(depth, self.heads)}")), self.net)

    def describe(self) -> dict[str, Any]:
        return self.tree.describe()

    # --- training

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Return the sum over heads k of 0.8^k times the head's cross-entropy (section 2.2)."""
        features_ND = batch.features_NF.to(self.dtype)

        def read(k: int, rows_M: Tensor) -> tuple[Tensor, Tensor]:
            lm_head = self.net.output(k)
            return self.net(features_ND[rows_M], k), lm_head_like(self.target) if lm_head is None else lm_head

        return heads_loss(self.target, batch, self.heads, read, DECAY, self.options.objective)
