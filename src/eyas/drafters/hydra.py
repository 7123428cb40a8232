"""hydra: Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which also sees the tokens drafted before its own.

Head k reads the target's final feature of the newest committed token t and the embeddings of the tokens since, the root and the path's:

    [ feature of t ; e(t+1) ; ... ; e(t+1+k) ]  ->  R x + SiLU(W x + b)  ->  blocks: x + SiLU(W x + b)  ->  lm_head  ->  q of token t+2+k

So the children of a node depend on its path. Hydra++ (section 4) has a decoder layer of its own over all features so far, whose output
stands in the place of the feature (`--head.arch prefix-mlp`), more blocks, and learns the target's law instead of the data's tokens, which
is what heads learn here unless told otherwise. Trees are as in `medusa`, chosen at any temperature.

Not here: the noise and dropout that the authors train with.
Letters: B rows, Q nodes of a level, W ranks or width of a head's input, D hidden, N packed tokens, M nodes below the root or positions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas import checkpoints
from eyas.checkpoints import Weights
from eyas.core.drafter import Batch, CycleInput, DraftSession, Loss, Shape
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Choices, Draft
from eyas.drafters._eagle import EagleMethod, Window, own_table, shape_like, shape_of
from eyas.drafters._grow import DynamicTree, Growth, grow_dynamic
from eyas.drafters._heads import FeatureSession, Objective, RankTree, best_children, check_head, check_objective, heads_loss, lm_head_like
from eyas.drafters.medusa import HeadTree, ResBlock
from eyas.errors import CheckpointError, OptionError, near
from eyas.nn import DecoderLayer, Documents, DraftCache, LayerShape, RMSNorm

__all__ = ["Method", "Net"]

DECAY = 1.0  # all heads weigh the same in the loss
ARCHES = ("mlp", "prefix-mlp")


@dataclass(frozen=True)
class NewHeads:
    """What heads are like whose training begins. Trained heads bring their own."""

    count: Annotated[int, NEW_HEADS] = 4
    """How many; each foretells one token further."""
    blocks: Annotated[int, NEW_HEADS] = 1
    """Residual blocks in each."""
    arch: Annotated[Literal["mlp", "prefix-mlp"], NEW_HEADS] = "mlp"
    """On the target's feature, or on a layer over all features so far (Hydra++)."""

    def __post_init__(self) -> None:
        for name in ("count", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"head.{name} must be a whole number, 1 or more, got {value!r}")
        if self.arch not in ARCHES:
            raise OptionError(f"unknown head.arch {self.arch!r}; {near(self.arch, ARCHES)}")


@dataclass(frozen=True)
class Options:
    """Flags of hydra."""

    tree: HeadTree = field(default_factory=HeadTree)
    window: Window = field(default_factory=Window)
    """Of Hydra++'s layer."""
    head: NewHeads = field(default_factory=NewHeads)
    objective: Annotated[Objective, TRAINING] = "law"
    """What a head learns: the tokens of the data, or the target's law of them."""

    def __post_init__(self) -> None:
        check_objective(self.objective)


# --- the net ---------------------------------------------------------------------------------------------------------------------------


class FirstBlock(nn.Module):
    """R x + c + SiLU(W x + b): from the width of what a head reads to D."""

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear, self.residual = nn.Linear(in_size, hidden_size), nn.Linear(in_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))  # type: ignore[no-any-return]


class Prefix(DecoderLayer):
    """Hydra++'s layer over the features, normed before and after."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_norm, self.norm = (RMSNorm(shape.hidden_size, shape.rms_eps) for _ in range(2))


class Net(nn.Module):
    """The heads, and Hydra++'s layer before them. A session hands it pairs; the layer reads their features only."""

    def __init__(self, hidden_size: int, vocab_size: int, heads: int, blocks: int, prefix: LayerShape | None) -> None:
        super().__init__()
        D, more = hidden_size, range(blocks - 1)
        self.prefix = Prefix(prefix) if prefix is not None else None
        self.mlp = nn.ModuleList(nn.Sequential(FirstBlock((k + 2) * D, D), *(ResBlock(D, D) for _ in more)) for k in range(heads))
        self.lm_head = nn.ModuleList(nn.Linear(D, vocab_size) for _ in range(heads))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def remember(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        assert self.prefix is not None
        self.prefix.attention.store(self.prefix.input_norm(hidden_RND), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """The layer's output [R, N, D]."""
        prefix = self.prefix
        assert prefix is not None
        return prefix.norm(prefix.decode(prefix.input_norm(hidden_RND), hidden_RND, position_RN, cache))  # type: ignore[no-any-return]

    def packed(self, features_ND: Tensor, rows_M: Tensor, documents: Documents) -> Tensor:
        """While training: what stands in the place of the features of some rows [M, D]."""
        prefix = self.prefix
        if prefix is None:
            return features_ND[rows_M]
        x_ND, position_N = prefix.input_norm(features_ND), documents.position_N(features_ND.device)
        keys = prefix.attention.keys(x_ND, position_N)
        attended = prefix.attention.attend_packed(x_ND[rows_M], position_N[rows_M], documents.query_rows(rows_M), keys)
        return prefix.norm(prefix.finish(features_ND[rows_M], attended))  # type: ignore[no-any-return]


# --- the method ------------------------------------------------------------------------------------------------------------------------


class Level:
    """One level of a fixed tree: which of the best children of the nodes above are in it, and which of it have children themselves."""

    def __init__(self, choices: Choices, depth: int, device: torch.device) -> None:
        def at(d: int) -> list[tuple[int, ...]]:
            return [path for path in choices if len(path) == d]

        inner = sorted({path[:-1] for path in at(depth)})
        further = sorted({path[:-1] for path in at(depth + 1)})
        self.number, self.width = depth - 1, 1 + max(path[-1] for path in at(depth))
        self.flat_M = torch.tensor([inner.index(path[:-1]) * self.width + path[-1] for path in at(depth)], device=device)
        self.inner_Q = torch.tensor([at(depth).index(path) for path in further], dtype=torch.long, device=device)
        self.above_Q = torch.tensor([inner.index(path[:-1]) for path in further], dtype=torch.long, device=device)


class Method(EagleMethod):
    """Hydra, and Hydra++ with a prefix layer, on the frozen target."""

    Options: ClassVar[type] = Options
    summary = "Hydra: Medusa's heads, each also sees the tokens drafted before its own; Hydra++"
    reads = "hydra"
    net: Net

    def __init__(self, target: Target, options: Any, net: Net, shape: LayerShape, embed_tokens: Tensor | None = None) -> None:
        """shape: of the prefix layer, where there is one."""
        super().__init__(target, options)
        self.net, self.shape, self.embed_tokens = net, shape, embed_tokens
        self.feature_layers, self.heads = (target.num_layers,), len(net.mlp)
        if net.prefix is None and self.options.window != Window():
            raise OptionError("this head keeps no cache that a window could cut: leave --window.* out")
        self.dynamic: DynamicTree | None = self.options.tree.dynamic(self.heads)
        fixed = None if self.dynamic else self.options.tree.of_heads(self.heads, target.vocab_size)
        self.tree = RankTree(fixed, target.device) if fixed else None
        self.levels = [Level(fixed, 1 + d, target.device) for d in range(self.tree.depth)] if fixed and self.tree else []

    @classmethod
    def layers_studied(cls, target: Target, options: Any) -> tuple[int, ...]:
        return (target.num_layers,)

    @property
    def shape_weight(self) -> Tensor:
        return self.net.lm_head[0].get_parameter("weight")

    @property
    def longest_path(self) -> int:
        return 1 + (self.tree.depth if self.tree else self.heads)

    @property
    def max_tree(self) -> Shape | None:
        return None if self.dynamic is None else self.dynamic.shape

    # --- where heads come from

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Strictly: width and vocabulary must be the target's, every tensor must be there and nothing else."""
        weights = check_head(weights, cls.reads, target)
        config, table = weights.config, "embed.weight"
        shape = _base_shape(weights, target) if config["layer"] is None else shape_of(config["layer"])
        prefix = shape if config["arch"] == "prefix-mlp" else None
        net = Net(target.hidden_size, target.vocab_size, config["heads"], config["blocks"], prefix)
        shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        checkpoints.expect(weights, {**shapes, table: (target.vocab_size, target.hidden_size)}, {table})
        net.load_state_dict({name: value for name, value in weights.tensors.items() if name != table})
        own = own_table(weights.tensors.get(table), target)
        return cls(target, options or cls.Options(), net.to(device=target.device, dtype=target.dtype).eval(), shape, own)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0, **shape: Any) -> Self:
        """Hydra++'s layer has the target's own shape unless given otherwise."""
        options, layer = options or cls.Options(), shape_like(target, **shape)
        plan = options.head
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = Net(target.hidden_size, target.vocab_size, plan.count, plan.blocks, layer if plan.arch == "prefix-mlp" else None)
            for name, weight in net.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
                elif name.endswith("bias"):
                    nn.init.zeros_(weight)
        return cls(target, options, net.to(device=target.device, dtype=target.dtype).eval(), layer)

    @classmethod
    def init_for_training(cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None) -> Self:
        """All heads begin as the target's own head on the feature, and see no tokens; Hydra++'s layer hands the feature on, normed."""
        method = cls.random(target, options, seed)
        net, D = method.net, target.hidden_size
        with torch.no_grad():
            for weight in net.mlp.parameters():
                weight.zero_()
            for k in range(method.heads):
                net.mlp[k].get_parameter("0.residual.weight")[:, :D] = torch.eye(D)
                own = net.lm_head[k].get_parameter("weight")
                own.copy_(lm_head_like(target, own))
            if net.prefix is not None:
                net.prefix.attention.o.weight.zero_()
                net.prefix.mlp.down.weight.zero_()
                some_1T = torch.arange(min(64, target.context, target.vocab_size), device=target.device)[None]
                net.prefix.norm.weight.fill_(target.encode(some_1T, method.feature_layers).float().square().mean().sqrt())
        return method

    def weights(self) -> Weights:
        config = {
            "heads": self.heads, "blocks": len(list(self.net.mlp[0].children())), "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size, "arch": "mlp" if self.net.prefix is None else "prefix-mlp",
            "layer": None if self.net.prefix is None else asdict(self.shape), "base_model": self.target.name,
            "eyas": {"target_fingerprint": self.target.fingerprint()},
        }  # fmt: skip
        tensors = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        if self.embed_tokens is not None:
            tensors["embed.weight"] = self.embed_tokens
        return Weights("hydra", config, tensors, "memory")

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return FeatureSession(rows, self.target, self.below) if self.net.prefix is None else super().open(rows)

    def head(self, hidden: Tensor) -> Tensor:
        """What a head reads, [..., (k+2) D], which tells the head -> logits [..., V]."""
        k = hidden.shape[-1] // self.target.hidden_size - 2
        net: Net = self.decoding
        logits: Tensor = net.lm_head[k](net.mlp[k](hidden))
        return logits

    def grow(self, growth: Growth, roots: CycleInput) -> Draft:
        return self.below(growth.hidden_BD, roots)

    def below(self, feature_BD: Tensor, roots: CycleInput) -> Draft:
        """The tree below the roots. What a node's children are made of is the input of its parent's and the node's own embedding."""

        def longer(hidden_BQW: Tensor, tokens_BQ: Tensor) -> Tensor:
            return torch.cat([hidden_BQW, self.embed(tokens_BQ).to(self.dtype)], dim=-1)

        hidden_BQW = longer(feature_BD[:, None].to(self.dtype), roots.tokens_B[:, None])
        if self.dynamic is not None:
            growth = Growth(lambda: hidden_BQW[:, 0], self.head, lambda tokens_BQ, hidden, visible, level: longer(hidden, tokens_BQ))
            return grow_dynamic(growth, roots, self.dynamic)
        assert self.tree is not None
        tokens, scores = list[Tensor](), list[Tensor]()
        for level in self.levels:
            number_Q = torch.full((hidden_BQW.shape[1],), level.number, device=hidden_BQW.device)
            best = best_children(self.head(hidden_BQW), roots, self.options.tree.noise, number_Q, level.width)
            tokens_BM, score_BM = (x_BQW.flatten(1)[:, level.flat_M] for x_BQW in best)
            tokens.append(tokens_BM)
            scores.append(score_BM)
            if len(level.inner_Q):
                hidden_BQW = longer(hidden_BQW[:, level.above_Q], tokens_BM[:, level.inner_Q])
        return self.tree.draft(roots, torch.cat(tokens, dim=1), torch.cat(scores, dim=1))

    def chain(self, depth: int) -> Method:
        """As deep as there are heads at most."""
        options = Options(tree=HeadTree(f"chain-{min(depth, self.heads)}"), window=self.options.window)
        return Method(self.target, options, self.net, self.shape, self.embed_tokens)

    def describe(self) -> dict[str, Any]:
        if self.dynamic is not None:
            return {**self.dynamic.describe(), "heads": self.heads, **super().describe()}
        assert self.tree is not None
        tree = {"kind": "static", "choices": self.options.tree.choices, "nodes": 1 + len(self.tree.choices), "depth": self.tree.depth}
        return {**tree, "heads": self.heads, **super().describe()}

    # --- training

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Section 3: cross-entropy of every head with the true tokens on its path."""
        features_ND, tokens_N = batch.features_NF.to(self.dtype), batch.tokens_N
        N, order_N = len(tokens_N), torch.arange(len(tokens_N), device=tokens_N.device)
        goal_NK = order_N[:, None] + 2 + torch.arange(self.heads, device=tokens_N.device)
        asked_N = (batch.counted_N[goal_NK.clamp(max=N - 1)] & (goal_NK < batch.documents.end_N(tokens_N.device)[:, None])).any(1)
        hidden_MD = self.net.packed(features_ND, asked_N.nonzero()[:, 0], batch.documents)
        place_N, embeddings_ND = asked_N.cumsum(0) - 1, self.embed(tokens_N).to(self.dtype)

        def guess(k: int, rows_M: Tensor) -> tuple[Tensor, Tensor]:
            path = [embeddings_ND[rows_M + 1 + i] for i in range(k + 1)]
            read_MD, output = self.net.mlp[k](torch.cat([hidden_MD[place_N[rows_M]], *path], dim=-1)), self.net.lm_head[k]
            joined_VD = torch.cat([output.get_parameter("weight"), output.get_parameter("bias")[:, None]], dim=-1)
            return F.pad(read_MD, (0, 1), value=1.0), joined_VD  # a bias is the weight of a one

        return heads_loss(self.target, batch, self.heads, guess, DECAY, self.options.objective)


def _base_shape(weights: Weights, target: Target) -> LayerShape:
    """The prefix layer of a published head is one of its base model's: LLaMA's, with its plain RoPE."""
    if weights.config["arch"] != "prefix-mlp":
        return shape_like(target)
    config = target.model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or rope.get("rope_type", "default") != "default" or getattr(config, "attention_bias", False):
        raise CheckpointError(
            f"{weights.source}: its prefix layer has the shape of its base model's, which is known here for LLaMA with plain RoPE; "
            f"the target is {config.model_type} with RoPE {rope.get('rope_type', 'default')}"
        )
    return shape_like(target)
