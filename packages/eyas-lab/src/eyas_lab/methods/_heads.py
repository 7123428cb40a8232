"""Shared by methods with one head per token ahead (Medusa, Hydra): their trees, which are deterministic, and the loss
of all heads.

Letters: D hidden, V vocabulary, N tokens, M that count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from eyas import elsewhere
from eyas.core.drafter import CycleInput
from eyas.core.options import NEW_HEADS
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, chain_choices, check_choices
from eyas.drafters import Batch, Loss
from eyas.drafters.eagle1 import StaticTree
from eyas.drafters.tools import DraftNetSteps, DynamicTree, check_choice, check_whole, grow_dynamic, grow_static
from eyas.errors import OptionError

__all__ = ["REFERENCE_TREE", "HeadCount", "HeadTreeOptions", "HeadsTree", "heads_loss", "lm_head_like"]

OBJECTIVES = ("tokens", "distribution")
BRANCH = 10  # children of a node in a dynamic tree


@dataclass(frozen=True)
class HeadCount:
    """How many heads, and how deep."""

    count: Annotated[int, NEW_HEADS] = 4
    """How many; each predicts one token further ahead."""
    blocks: Annotated[int, NEW_HEADS] = 1
    """Residual blocks in each."""

    def __post_init__(self) -> None:
        check_whole("head", 1, count=self.count, blocks=self.blocks)


# --- trees


# The 63 draft nodes that the authors of Medusa chose for Vicuna-7B, four deep: how many children the node of
# each path has. A digit is a rank.
_CHILDREN = {
    "": 10, "0": 10, "1": 7, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1, "8": 1, "9": 1,
    "00": 10, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "20": 1, "000": 2,
}  # fmt: skip
REFERENCE_TREE: Choices = check_choices(
    (*map(int, path), rank) for path, count in _CHILDREN.items() for rank in range(count)
)


@dataclass(frozen=True)
class HeadTreeOptions(StaticTree):
    """The tree of several heads."""

    choices: str | Choices = "reference"
    """Reference (64 nodes), chain, chain-N, dynamic (the most probable paths), or a JSON file."""
    nodes: int | None = None
    """Nodes of a dynamic tree that are verified per cycle, the root included; none: 60."""
    noise: str = "coupled"
    """Sampling: rank children with the target's own noise (coupled), or by q alone (none)."""

    def __post_init__(self) -> None:
        if self.nodes is not None and self.choices != "dynamic":
            raise OptionError(
                "tree.nodes is for --tree.choices dynamic; another tree has as many nodes as it has choices"
            )
        check_choice("tree.noise", self.noise, ("coupled", "none"))

    def for_heads(self, heads: int, vocab_size: int) -> Choices:
        """Return the paths of a static tree; raise OptionError when it is deeper or wider than heads and vocabulary
        allow."""
        if self.choices == "reference":
            return tuple(path for path in REFERENCE_TREE if len(path) <= heads and max(path) < vocab_size)
        choices = chain_choices(heads) if self.choices == "chain" else self.resolve()
        depth, widest = max(map(len, choices)), 1 + max(path[-1] for path in choices)
        if depth > heads:
            raise OptionError(
                f"tree.choices: the tree is {depth} deep, and one level needs one head: this draft has {heads}"
            )
        if widest > vocab_size:
            raise OptionError(f"tree.choices: a node has {widest} children, the vocabulary {vocab_size} tokens")
        return choices


class HeadsTree:
    """The tree that several heads draft: static, or the most probable paths (dynamic).

    Attributes:
        depth: levels, each of which needs a head.
        max_tree: the size of a dynamic tree; None for a static tree.
    """

    def __init__(self, options: HeadTreeOptions, heads: int, target: Target) -> None:
        self.options, self.heads, self.depth = options, heads, heads
        self.dynamic: DynamicTree | None = None
        self.choices: Choices = ()
        if options.choices == "dynamic":
            nodes = 60 if options.nodes is None else options.nodes
            self.dynamic = DynamicTree(nodes, heads, BRANCH, noise=options.noise)
        else:
            self.choices = options.for_heads(heads, target.vocab_size)
            self.depth = max(map(len, self.choices))
        self.max_tree = None if self.dynamic is None else self.dynamic.size

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        """Return the tree below the roots."""
        if self.dynamic is not None:
            return grow_dynamic(net_steps, cycle_input, self.dynamic)
        return grow_static(net_steps, cycle_input, self.choices, self.options.noise)

    def describe(self) -> dict[str, Any]:
        """Return the size of the tree, for records."""
        if self.dynamic is not None:
            return {**self.dynamic.describe(), "heads": self.heads}
        size = {"nodes": 1 + len(self.choices), "depth": self.depth, "heads": self.heads}
        return {"kind": "static", "choices": self.options.choices, **size}


# --- training


def heads_loss(
    target: Target, batch: Batch, heads: int, read: Callable[[int, Tensor], tuple[Tensor, Tensor]], decay: float,
    objective: str,
) -> Loss:  # fmt: skip
    """Return the sum over heads k of decay^k times the cross-entropy of head k. Head k at token t predicts token
    t+2+k, and counts where the batch counts that token.

    `Loss.count` is the count of the first head. Later heads count a few tokens less, at the ends of documents.

    Args:
        batch: with the target's final features.
        read: (k, rows_M) -> the input of head k's lm_head at these tokens, [M, D], and that lm_head, [V, D].
        objective: tokens: learn the tokens of the data; distribution: learn the target's
            distribution after the tokens before them.
    """
    training = elsewhere.part("losses", "training")
    tokens_N, N, device = batch.tokens_N, len(batch.tokens_N), batch.tokens_N.device
    order_N, end_N = torch.arange(N, device=device), batch.documents.end_N(device)
    total, count = torch.zeros((), dtype=torch.float32, device=device), torch.zeros((), dtype=torch.long)
    right = dict[int, Tensor]()
    for k in range(heads):
        goal_N = order_N + 2 + k
        rows_M = (batch.counted_N[goal_N.clamp(max=N - 1)] & (goal_N < end_N)).nonzero()[:, 0]
        goal_M, M = goal_N[rows_M], len(rows_M)

        def teacher(part: slice, goal_M: Tensor = goal_M) -> Tensor:
            if objective == "distribution":
                return target.head(batch.features_NF[goal_M[part] - 1].to(target.dtype))
            token_C1 = tokens_N[goal_M[part], None]
            logits_CV = torch.full((len(token_C1), target.vocab_size), -torch.inf, device=device)
            return logits_CV.scatter_(1, token_C1, 0.0)  # all mass on the token of the data

        hidden_MD, weight_VD = read(k, rows_M)
        every_M = torch.arange(M, device=device)
        weight_M = torch.full_like(every_M, decay**k, dtype=torch.float)
        guesses = training.draft_losses(hidden_MD, weight_VD, every_M, weight_M, M, teacher)
        total = total + guesses.total
        right[k] = guesses.is_correct_K.sum()
        if k == 0:
            count = torch.tensor(M, device=device)
    sums = {"accuracy": right[0]}
    if heads > 1:
        sums[f"accuracy of head {heads}"] = right[heads - 1]
    return Loss(total, count, sums)


def lm_head_like(target: Target, otherwise: Tensor | None = None) -> Tensor:
    """Return a head [V, D] like the target's, except for a softcap. Where the target's is not a plain matrix, return
    `otherwise`, or raise OptionError without it."""
    weight: Tensor | None = getattr(target.family.head, "weight", None)
    if weight is not None and weight.shape == (target.vocab_size, target.hidden_size):
        return weight.detach().to(target.device) * target.family.logit_scale
    if otherwise is None:
        raise OptionError(
            "the target's head is not a plain matrix, so heads cannot be trained through it: give --head.output own"
        )
    return otherwise
