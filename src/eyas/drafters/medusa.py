"""medusa: Medusa-1 (Cai et al. 2024, arXiv 2401.10774): more heads beside the target's own, each for a token further ahead.

Head k (0, 1, ...) reads the target's final feature of the newest committed token t and nothing else. The target's own head makes token
t+1 of it, which is the root; head k foretells token t+2+k:

    feature of t  ->  blocks: x + SiLU(W x + b)  ->  lm_head of its own (or the target's)  ->  q of token t+2+k

A head does not know what stands between: the children of all nodes of a level are the same best tokens. So the tree is a product of lists
of ranks, of which the likely part is kept: a fixed part (section 2.3.3), or in each cycle the paths whose product of probabilities is
largest. Children are chosen, not drawn: at any temperature the same tokens come out as by plain decoding with the same seed. The paper's
typical acceptance, which changes what is said, is not here. With shared noise (see `_grow`) a node's children are ranked by what this
run will draw.

Letters: B rows, K heads, Q nodes of a level, W ranks, D hidden, V vocabulary, M nodes below the root or positions that count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.drafter import Batch, CycleInput, Drafter, DraftSession, Loss, Shape
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft, chain_choices, check_choices
from eyas.drafters._grow import DynamicTree, Growth, grow_dynamic
from eyas.drafters._heads import FeatureSession, Objective, RankTree, best_children, check_head, check_objective, heads_loss, lm_head_like
from eyas.drafters.eagle1 import StaticTree
from eyas.errors import OptionError, near

__all__ = ["HeadTree", "Method", "Net", "ResBlock"]

DECAY = 0.8  # each further head weighs less in the loss (section 2.2)
BRANCH = 10  # children of a node in a dynamic tree

# The 63 draft nodes that the authors chose for Vicuna-7B, four deep: how many children the node of each path has, a digit being a rank.
_CHILDREN = {
    "": 10, "0": 10, "1": 7, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1, "8": 1, "9": 1,
    "00": 10, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "20": 1, "000": 2,
}  # fmt: skip
REFERENCE_TREE: Choices = check_choices((*map(int, path), rank) for path, count in _CHILDREN.items() for rank in range(count))

OUTPUTS = ("own", "target")
NOISES = ("shared", "none")


@dataclass(frozen=True)
class HeadTree(StaticTree):
    """Which tree the heads draft."""

    choices: str | Choices = "reference"
    """Reference (64 nodes), chain, chain-N, dynamic (the most probable paths), or a JSON file."""
    nodes: int | None = None
    """Of a dynamic tree: verified per cycle, the root included; none: 60."""
    noise: str = "shared"
    """sampling: rank children by what this run will draw (shared: the target's own noise), or by q
    alone (none)."""

    def __post_init__(self) -> None:
        if self.nodes is not None and self.choices != "dynamic":
            raise OptionError("tree.nodes is for --tree.choices dynamic; another tree has as many nodes as it has choices")
        if self.noise not in NOISES:
            raise OptionError(f"unknown tree.noise {self.noise!r}; {near(self.noise, NOISES)}")

    def dynamic(self, depth: int) -> DynamicTree | None:
        """The shape to grow by probability, or None: the tree is a fixed one."""
        return DynamicTree(60 if self.nodes is None else self.nodes, depth, BRANCH, noise=self.noise) if self.choices == "dynamic" else None

    def of_heads(self, heads: int, vocab_size: int) -> Choices:
        """The fixed tree for that many heads; OptionError when it asks for more than they have."""
        if self.choices == "reference":
            return tuple(path for path in REFERENCE_TREE if len(path) <= heads and max(path) < vocab_size)
        choices = chain_choices(heads) if self.choices == "chain" else self.resolve()
        depth, widest = max(map(len, choices)), 1 + max(path[-1] for path in choices)
        if depth > heads:
            raise OptionError(f"tree.choices: the tree is {depth} deep, and one level needs one head: this draft has {heads}")
        if widest > vocab_size:
            raise OptionError(f"tree.choices: a node has {widest} children, the vocabulary {vocab_size} tokens")
        return choices


@dataclass(frozen=True)
class NewHeads:
    """What heads are like whose training begins. Trained heads bring their own."""

    count: Annotated[int, NEW_HEADS] = 4
    """How many; each foretells one token further."""
    blocks: Annotated[int, NEW_HEADS] = 1
    """Residual blocks in each."""
    output: Annotated[Literal["own", "target"], NEW_HEADS] = "own"
    """Lm_heads of their own, which are trained, or the target's for all."""

    def __post_init__(self) -> None:
        for name in ("count", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"head.{name} must be a whole number, 1 or more, got {value!r}")
        if self.output not in OUTPUTS:
            raise OptionError(f"unknown head.output {self.output!r}; {near(self.output, OUTPUTS)}")


@dataclass(frozen=True)
class Options:
    """Flags of medusa."""

    tree: HeadTree = field(default_factory=HeadTree)
    head: NewHeads = field(default_factory=NewHeads)
    objective: Annotated[Objective, TRAINING] = "tokens"
    """What a head learns: the tokens of the data, or the target's law of them."""

    def __post_init__(self) -> None:
        check_objective(self.objective)


# --- the net ---------------------------------------------------------------------------------------------------------------------------


class ResBlock(nn.Linear):
    """x + SiLU(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(super().forward(x))


class Net(nn.Module):
    """The heads."""

    def __init__(self, hidden_size: int, vocab_size: int | None, heads: int, blocks: int) -> None:
        """vocab_size: of lm_heads of their own; None: they have none."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(hidden_size, hidden_size) for _ in range(blocks))) for _ in range(heads))
        self.lm_head = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(heads)) if vocab_size else None

    def forward(self, features: Tensor, k: int) -> Tensor:
        """What head k's lm_head reads, [..., D], of the target's final features [..., D]."""
        hidden: Tensor = self.blocks[k](features)
        return hidden

    def output(self, k: int) -> Tensor | None:
        """Head k's own lm_head [V, D]."""
        return None if self.lm_head is None else self.lm_head[k].get_parameter("weight")


# --- the method ------------------------------------------------------------------------------------------------------------------------


class Method(Drafter):
    """Medusa-1 on the frozen target."""

    Options: ClassVar[type] = Options
    summary = "Medusa: several heads on one feature, each a token further ahead, tree of ranks"
    needs_weights = True
    trainable = True
    reads = "medusa"
    net: Net

    def __init__(self, target: Target, options: Any, net: Net) -> None:
        super().__init__(target, options)
        self.net, self.feature_layers, self.heads = net, (target.num_layers,), len(net.blocks)
        self.dynamic: DynamicTree | None = self.options.tree.dynamic(self.heads)
        fixed = None if self.dynamic else self.options.tree.of_heads(self.heads, target.vocab_size)
        self.tree = RankTree(fixed, target.device) if fixed else None

    @classmethod
    def layers_studied(cls, target: Target, options: Any) -> tuple[int, ...]:
        return (target.num_layers,)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype

    @property
    def max_tree(self) -> Shape | None:
        return None if self.dynamic is None else self.dynamic.shape

    # --- where heads come from

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Strictly: width and vocabulary must be the target's, every tensor must be there and nothing else."""
        weights = check_head(weights, cls.reads, target)
        config = weights.config
        net = Net(target.hidden_size, target.vocab_size if config["output"] == "own" else None, config["heads"], config["blocks"])
        checkpoints.expect(weights, {name: tuple(value.shape) for name, value in net.state_dict().items()})
        net.load_state_dict(weights.tensors)
        return cls(target, options or cls.Options(), net.to(device=target.device, dtype=target.dtype).eval())

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        options = options or cls.Options()
        plan = options.head
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Net(target.hidden_size, target.vocab_size if plan.output == "own" else None, plan.count, plan.blocks)
            for weight in net.parameters():
                nn.init.normal_(weight, std=target.hidden_size**-0.5)
        return cls(target, options, net.to(device=target.device, dtype=target.dtype).eval())

    @classmethod
    def init_for_training(cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None) -> Self:
        """All heads begin as the target's own: blocks that add nothing, then a copy of its lm_head (section 2.2)."""
        method = cls.random(target, options, seed)
        with torch.no_grad():
            for weight in method.net.blocks.parameters():
                weight.zero_()
            for k in range(method.heads):
                if (own := method.net.output(k)) is not None:
                    own.copy_(lm_head_like(target, own))
        return method

    def weights(self) -> Weights:
        net = self.net
        config = {
            "heads": self.heads, "blocks": len(list(net.blocks[0].children())), "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size if net.lm_head else None, "output": "own" if net.lm_head else "target",
            "base_model": self.target.name, "eyas": {"target_fingerprint": self.target.fingerprint()},
        }  # fmt: skip
        return Weights("medusa", config, {name: value.detach().clone() for name, value in net.state_dict().items()}, "memory")

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return FeatureSession(rows, self.target, self.grow)

    def logits(self, feature_BD: Tensor, heads: int) -> Tensor:
        """[B, K, V] of the first `heads` heads."""
        net: Net = self.decoding
        hidden_BKD = torch.stack([net(feature_BD.to(self.dtype), k) for k in range(heads)], dim=1)
        if net.lm_head is None:
            return self.target.head(hidden_BKD.to(self.target.dtype))
        return torch.stack([net.lm_head[k](hidden_BKD[:, k]) for k in range(heads)], dim=1)

    def grow(self, feature_BD: Tensor, roots: CycleInput) -> Draft:
        """The tree below the roots: at level k, the best tokens of head k."""
        if self.tree is None:
            assert self.dynamic is not None
            logits_BKV = self.logits(feature_BD, self.heads)

            def expand(tokens_BQ: Tensor, parents_BQV: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
                return logits_BKV[:, level + 1 : level + 2].expand(-1, tokens_BQ.shape[1], -1)

            return grow_dynamic(Growth(lambda: logits_BKV[:, 0], lambda logits: logits, expand), roots, self.dynamic)
        level_K = torch.arange(self.tree.depth, device=feature_BD.device)
        best = best_children(self.logits(feature_BD, self.tree.depth), roots, self.options.tree.noise, level_K, self.tree.width)
        return self.tree.draft(roots, *(x_BKW.flatten(1)[:, self.tree.flat_M] for x_BKW in best))

    def chain(self, depth: int) -> Method:
        """As deep as there are heads at most."""
        return Method(self.target, Options(tree=HeadTree(f"chain-{min(depth, self.heads)}")), self.net)

    def describe(self) -> dict[str, Any]:
        if self.tree is None:
            assert self.dynamic is not None
            return {**self.dynamic.describe(), "heads": self.heads}
        nodes = 1 + len(self.tree.choices)
        return {"kind": "static", "choices": self.options.tree.choices, "nodes": nodes, "depth": self.tree.depth, "heads": self.heads}

    # --- training

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Section 2.2: cross-entropy of every head, 0.8^k of head k's."""
        features_ND = batch.features_NF.to(self.dtype)

        def guess(k: int, rows_M: Tensor) -> tuple[Tensor, Tensor]:
            own = self.net.output(k)
            return self.net(features_ND[rows_M], k), lm_head_like(self.target) if own is None else own

        return heads_loss(self.target, batch, self.heads, guess, DECAY, self.options.objective)
