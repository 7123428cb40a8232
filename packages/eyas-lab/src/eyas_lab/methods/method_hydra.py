"""hydra: Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which also reads the
tokens drafted before its own.

Head k reads the target's final feature of the newest committed token t and the embeddings of the tokens
since: the root's and the path's.

    [ feature of t ; e(t+1) ; ... ; e(t+1+k) ]  ->  R x + SiLU(W x + b)  ->  blocks: x + SiLU(W x + b)  ->  lm_head  ->  q of token t+2+k

So the children of a node depend on its path. Hydra++ (section 4) has a decoder layer of its own
over all features so far, whose output takes the place of the feature (`--head.arch prefix-mlp`), and more
blocks. It learns the target's distribution instead of the data's tokens, which is the default here. Trees are
as in `medusa`, deterministic at any temperature. The noise and dropout of the authors' training are not here.

Letters: B rows, Q nodes of a level, W width of a head's input, D hidden, N packed tokens, M positions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas import elsewhere
from eyas.checkpoints import Weights
from eyas.core.drafter import CycleInput, DraftSession, TreeSize
from eyas.core.options import NEW_HEADS, TRAINING
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters import Batch, Loss
from eyas.drafters.tools import (
    DraftNetSteps,
    EagleMethod,
    FeatureSession,
    Window,
    check_choice,
    check_head,
    layer_shape,
    load_head,
    random_net,
    saved_head,
    target_layer_shape,
    target_sizes,
)
from eyas.errors import CheckpointError, OptionError
from eyas.nn import DecoderLayer, Documents, DraftCache, LayerShape, RMSNorm
from eyas_lab.methods._heads import OBJECTIVES, HeadCount, HeadsTree, HeadTreeOptions, heads_loss, lm_head_like
from eyas_lab.methods.method_medusa import ResBlock

__all__ = ["Method", "Net"]

DECAY = 1.0  # all heads weigh the same in the loss
ARCHES = ("mlp", "prefix-mlp")


@dataclass(frozen=True)
class NewHeads(HeadCount):
    """The architecture of heads whose training begins. Trained heads bring their own."""

    arch: Annotated[Literal["mlp", "prefix-mlp"], NEW_HEADS] = "mlp"
    """On the target's feature, or on a layer over all features so far (Hydra++)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("head.arch", self.arch, ARCHES)


@dataclass(frozen=True)
class Options:
    """Options of hydra."""

    tree: HeadTreeOptions = field(default_factory=HeadTreeOptions)
    window: Window = field(default_factory=Window)
    """The window of Hydra++'s layer."""
    head: NewHeads = field(default_factory=NewHeads)
    objective: Annotated[str, TRAINING] = "distribution"
    """A head learns from the tokens of the data (tokens), or from the target's distribution
    (distribution)."""

    def __post_init__(self) -> None:
        check_choice("objective", self.objective, OBJECTIVES)


# --- the net


class FirstBlock(nn.Module):
    """R x + c + SiLU(W x + b): from a head's input to width D."""

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, hidden_size)
        self.residual = nn.Linear(in_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual with the first block's change."""
        return self.residual(x) + F.silu(self.linear(x))  # type: ignore[no-any-return]


class Prefix(DecoderLayer):
    """Hydra++'s layer over the features, with norms before and after."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)


class Net(nn.Module):
    """The heads, and Hydra++'s layer in front of them. A session feeds it pairs, of which the layer
    reads the features."""

    def __init__(self, hidden_size: int, vocab_size: int, heads: int, blocks: int, prefix: LayerShape | None) -> None:
        super().__init__()
        D, further = hidden_size, range(blocks - 1)
        self.prefix = Prefix(prefix) if prefix is not None else None
        self.mlp = nn.ModuleList(
            nn.Sequential(FirstBlock((k + 2) * D, D), *(ResBlock(D, D) for _ in further)) for k in range(heads)
        )
        self.lm_head = nn.ModuleList(nn.Linear(D, vocab_size) for _ in range(heads))

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features as they are."""
        return features

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        """Write the keys and values of the prefix layer for these positions into the cache."""
        assert self.prefix is not None
        self.prefix.attention.store(self.prefix.input_norm(hidden_RND), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """Return the layer's output [R, N, D]."""
        prefix = self.prefix
        assert prefix is not None
        return prefix.norm(prefix.decode(prefix.input_norm(hidden_RND), hidden_RND, position_RN, cache))  # type: ignore[no-any-return]

    def packed(self, features_ND: Tensor, rows_M: Tensor, documents: Documents) -> Tensor:
        """Return, in training, the features of some rows as the heads read them, [M, D]."""
        prefix = self.prefix
        if prefix is None:
            return features_ND[rows_M]
        x_ND, position_N = prefix.input_norm(features_ND), documents.position_N(features_ND.device)
        keys = prefix.attention.rotated_key_value(x_ND, position_N)
        training = elsewhere.part("losses", "training")
        queries = training.QueryRows(rows_M, documents.lengths)
        attended = training.attend_packed(prefix.attention, x_ND[rows_M], position_N[rows_M], queries, keys)
        return prefix.norm(prefix.finish(features_ND[rows_M], attended))  # type: ignore[no-any-return]


# --- the method


class Method(EagleMethod):
    """Hydra, and Hydra++ with a prefix layer, on the frozen target."""

    Options: ClassVar[type] = Options
    summary = "Hydra: Medusa's heads, each also sees the tokens drafted before its own; Hydra++"
    head_format = "hydra"
    net: Net

    def __init__(
        self, target: Target, options: Any, net: Net, shape: LayerShape, embed_tokens: Tensor | None = None
    ) -> None:
        """shape: the shape of the prefix layer, where there is one."""
        super().__init__(target, options)
        self.net = net
        self.shape = shape
        self.embed_tokens = embed_tokens
        self.feature_layers = (target.num_layers,)
        self.heads = len(net.mlp)
        if net.prefix is None and self.options.window != Window():
            raise OptionError("this head keeps no cache that a window could cut: leave --window.* out")
        self.tree = HeadsTree(self.options.tree, self.heads, target)

    @property
    def longest_path(self) -> int:
        return 1 + self.tree.depth

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
        shape = _base_shape(weights, target) if config["layer"] is None else layer_shape(config["layer"])
        prefix = shape if config["arch"] == "prefix-mlp" else None
        net = Net(target.hidden_size, target.vocab_size, config["heads"], config["blocks"], prefix)
        net, embed_tokens = load_head(net, weights, target)
        return cls(target, options or cls.Options(), net, shape, embed_tokens)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0, **shape: Any) -> Self:
        """Return heads whose prefix layer (Hydra++) has the target's own sizes; `shape` replaces some of them."""
        options, layer = options or cls.Options(), target_layer_shape(target, **shape)
        new, (D, V) = options.head, (target.hidden_size, target.vocab_size)
        prefix = layer if new.arch == "prefix-mlp" else None
        net = random_net(lambda: Net(D, V, new.count, new.blocks, prefix), target, seed)
        return cls(target, options, net, layer)

    @classmethod
    def init_for_training(
        cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None
    ) -> Self:
        """Return heads that begin as the target's own head on the feature and ignore the tokens; Hydra++'s layer
        passes the feature on, normed."""
        method = cls.random(target, options, seed)
        net, D = method.net, target.hidden_size
        with torch.no_grad():
            for weight in net.mlp.parameters():
                weight.zero_()
            for k in range(method.heads):
                nn.init.eye_(net.mlp[k].get_parameter("0.residual.weight")[:, :D])
                lm_head = net.lm_head[k].get_parameter("weight")
                lm_head.copy_(lm_head_like(target, lm_head))
            if net.prefix is not None:
                net.prefix.attention.o.weight.zero_()
                net.prefix.mlp.down.weight.zero_()
                some_1T = torch.arange(min(64, target.context, target.vocab_size), device=target.device)[None]
                net.prefix.norm.weight.fill_(
                    target.encode(some_1T, method.feature_layers).float().square().mean().sqrt()
                )
        return method

    def weights(self) -> Weights:
        prefix = self.net.prefix is not None
        config = {
            "heads": self.heads,
            "blocks": len(list(self.net.mlp[0].children())),
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "arch": "prefix-mlp" if prefix else "mlp",
            "layer": asdict(self.shape) if prefix else None,
            "base_model": self.target.name,
        }
        return saved_head(self.head_format, config, self.net, self.target, self.embed_tokens)

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return FeatureSession(rows, self.target, self.grow_below) if self.net.prefix is None else super().open(rows)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of a head's input [..., (k+2) D], whose width tells which head, k, it is for."""
        k = hidden.shape[-1] // self.target.hidden_size - 2
        net: Net = self.decoding_net
        logits: Tensor = net.lm_head[k](net.mlp[k](hidden))
        return logits

    def grow(self, net_steps: DraftNetSteps, cycle_input: CycleInput) -> Draft:
        return self.grow_below(net_steps.hidden_BD, cycle_input)

    def grow_below(self, feature_BD: Tensor, cycle_input: CycleInput) -> Draft:
        """Return the tree below the roots. A node's head reads the input of its parent's head, and the node's own
        embedding; zeros follow, so that all inputs are as wide as the last head's."""
        D, width, level = self.target.hidden_size, (self.tree.depth + 1) * self.target.hidden_size, 0
        root_BX = torch.cat([feature_BD.to(self.dtype), self.embed(cycle_input.tokens_B).to(self.dtype)], dim=-1)

        def head(hidden_BQW: Tensor) -> Tensor:
            return self.head(hidden_BQW[..., : (level + 2) * D])

        def expand(tokens_BQ: Tensor, hidden_BQW: Tensor, visible: Tensor, above: int) -> Tensor:
            nonlocal level
            level = above + 1
            own_BQD = self.embed(tokens_BQ).to(self.dtype)
            return hidden_BQW + F.pad(own_BQD, ((level + 1) * D, width - (level + 2) * D))

        net_steps = DraftNetSteps(lambda: F.pad(root_BX, (0, width - 2 * D)), head, expand)
        return self.tree.grow(net_steps, cycle_input)

    def chain(self, depth: int) -> Method:
        """Return the method with a chain, at most as deep as there are heads."""
        options = Options(tree=HeadTreeOptions(f"chain-{min(depth, self.heads)}"), window=self.options.window)
        return Method(self.target, options, self.net, self.shape, self.embed_tokens)

    def describe(self) -> dict[str, Any]:
        return {**self.tree.describe(), **super().describe()}

    # --- training

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Return the cross-entropy of every head with the true tokens on its path (section 3)."""
        features_ND, tokens_N = batch.features_NF.to(self.dtype), batch.tokens_N
        N, order_N = len(tokens_N), torch.arange(len(tokens_N), device=tokens_N.device)
        goal_NK = order_N[:, None] + 2 + torch.arange(self.heads, device=tokens_N.device)
        end_N1 = batch.documents.end_N(tokens_N.device)[:, None]
        read_N = (batch.counted_N[goal_NK.clamp(max=N - 1)] & (goal_NK < end_N1)).any(1)  # read by some head
        hidden_MD = self.net.packed(features_ND, read_N.nonzero()[:, 0], batch.documents)
        place_N, embeddings_ND = read_N.cumsum(0) - 1, self.embed(tokens_N).to(self.dtype)

        def read(k: int, rows_M: Tensor) -> tuple[Tensor, Tensor]:
            path = [embeddings_ND[rows_M + 1 + i] for i in range(k + 1)]
            read_MD = self.net.mlp[k](torch.cat([hidden_MD[place_N[rows_M]], *path], dim=-1))
            lm_head = self.net.lm_head[k]
            joined_VD = torch.cat([lm_head.get_parameter("weight"), lm_head.get_parameter("bias")[:, None]], dim=-1)
            return F.pad(read_MD, (0, 1), value=1.0), joined_VD  # a bias is the weight of a one

        return heads_loss(self.target, batch, self.heads, read, DECAY, self.options.objective)


def _base_shape(weights: Weights, target: Target) -> LayerShape:
    """Return the shape of a published head's prefix layer. Its base model's layers have the same: LLaMA's, with plain
    RoPE."""
    shape = target_layer_shape(target)
    if weights.config["arch"] != "prefix-mlp":
        return shape
    config = target.model.config
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if config.model_type != "llama" or rope_type != "default" or getattr(config, "attention_bias", False):
        raise CheckpointError(
            f"{weights.source}: its prefix layer has the shape of its base model's, which is known here for LLaMA with plain RoPE; "
            f"the target is {config.model_type} with RoPE {rope_type}"
        )
    return shape
