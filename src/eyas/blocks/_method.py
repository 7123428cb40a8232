"""The base of block drafters (DFlash, DFlash 2, DSpark): heads on disk, new heads and trees from the
distributions of a block's slots. The session runs the net once in every cycle.

Slots count from 0, the root's. Either slot i predicts the token at its own place (the first level
is slot 1's), or the next one (slot 0's): `from_anchor`. No tensor shows which, so the checkpoint's
config must say.

    prefill   the net stores keys and values of the prompt's features
    draft     the same for the tokens accepted in the last cycle ("pending"); then one pass over [root, mask, mask, ...]. The slots
              give the distributions of the levels, and the tree grows from them without a further pass
    commit    the features of the accepted path become pending; keys and values of the block are overwritten by the next ones

Letters: B rows, R rows of a forward, S levels, Q nodes of a level, P nodes on the longest path, n slots of a block, T tokens,
D hidden, F features, V vocabulary, W slots of the cache.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from eyas.blocks._net import BlockFormat, BlockNet, Extras
from eyas.checkpoints import Weights
from eyas.core.cache import KVCache, slot_mask
from eyas.core.drafter import Capturable, CycleInput, DraftSession, TreeSize
from eyas.core.options import NEW_HEADS
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters import DraftMethod
from eyas.drafters.tools import (
    MARGIN,
    DraftNetSteps,
    DynamicTree,
    check_head,
    check_whole,
    grow_dynamic,
    layer_config,
    layer_numbers,
    layer_shape,
    load_head,
    mask_token,
    random_net,
    saved_head,
    target_layer_shape,
    target_sizes,
)
from eyas.errors import CheckpointError, FitError
from eyas.nn import LayerShape

__all__ = ["BlockMethod", "BlockSession", "BlockTraining", "NewBlockHead", "fused_layers"]

HEAD, DRAFT_IDS = "head.weight", "draft_ids"
FORMAT = tuple(entry.name for entry in fields(BlockFormat))
EXTRAS = tuple(entry.name for entry in fields(Extras) if entry.name != "own_head")


@dataclass(frozen=True)
class NewBlockHead:
    """The architecture of a head whose training begins. A trained head brings its own."""

    depth: Annotated[int, NEW_HEADS] = 3
    """Layers of the net."""
    block: Annotated[int, NEW_HEADS] = 8
    """Slots of a block, the root's included."""
    layers: Annotated[str, NEW_HEADS] = "auto"
    """Layers of the target whose inputs are fused, like 2,8,14 (indices of hidden_states); auto: as
    many as the net has, evenly from 2 to L-2."""
    mask_token: Annotated[int | None, NEW_HEADS] = None
    """The token that stands for an unknown one; none: the padding token, or the one that counts
    least in the training data."""

    def __post_init__(self) -> None:
        check_whole("head", 1, depth=self.depth)
        check_whole("head", 2, block=self.block)
        if self.mask_token is not None:
            check_whole("head", 0, mask_token=self.mask_token)


@dataclass(frozen=True)
class BlockTraining:
    """The weights of the loss."""

    anchors: int  # blocks in each document, at most
    gamma: float  # levels after which a prediction weighs a factor e less
    smoothing: float | None  # of D-PACE's weights; None: weights by gamma
    objective: str  # what the cross-entropy compares with: tokens of the data, or the target's distribution
    cross_entropy: float = 1.0
    overlap: float = 0.0
    confidence: float = 0.0


class BlockMethod(DraftMethod):
    """A method that drafts a whole block in one pass of its net. Its trees are deterministic."""

    needs_weights: ClassVar[bool] = True
    trainable: ClassVar[bool] = True
    label: ClassVar[str]  # the method's name for people
    new_from_anchor: ClassVar[bool] = False  # `BlockFormat.from_anchor` of new heads
    net: BlockNet

    def __init__(
        self, target: Target, options: Any, net: BlockNet, shape: LayerShape, layers: tuple[int, ...],
        block_format: BlockFormat, embed_tokens: Tensor | None = None, draft_ids_v: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, options)
        self.net, self.shape, self.block_format, self.embed_tokens = net, shape, block_format, embed_tokens
        self.draft_ids_v = draft_ids_v  # the target's ids of the draft tokens; None: all of them
        scale = block_format.embed_scale
        self.own_embed_scale = scale is not None and abs(scale / embed_scale(target) - 1) > 0.01
        own = target.family.logit_scale, target.family.softcap or 0.0
        self.own_logit_scale = (block_format.logit_scale, block_format.logit_cap) not in ((None, 0.0), own)
        self.feature_layers = layers
        self.tree: DynamicTree = replace(self.options.tree, depth=min(self.options.tree.depth, block_format.levels))

    @classmethod
    def new_extras(cls, options: Any) -> Extras:
        """Return the further heads of a new net."""
        return Extras()

    @property
    def training(self) -> BlockTraining:
        training: BlockTraining = self.options.train.loss()
        return training

    @property
    def train_feature_layers(self) -> tuple[int, ...]:
        """The fused layers, and the target's final norm, which gives its distribution."""
        return (*self.feature_layers, self.target.num_layers)

    @classmethod
    def new_head_layers(cls, target: Target, options: Any) -> tuple[int, ...]:
        """Return the `train_feature_layers` of new heads, without making them."""
        return (*fused_layers(options.head.layers, options.head.depth, target), target.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.norm.weight.dtype

    @property
    def max_tree(self) -> TreeSize | None:
        return self.tree.size

    # --- weights

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Load a head. Raise CheckpointError unless its sizes are the target's, and all tensors and no others are there."""
        sizes = {**target_sizes(target), "target_layers": ("number of target layers", target.num_layers)}
        weights = check_head(weights, cls.head_format, cls.label, sizes)
        config = weights.config
        layers = tuple(config["feature_layers"])
        if max(layers) >= target.num_layers:
            raise CheckpointError(
                f"{weights.source} reads the outputs of layers {[k - 1 for k in layers]}; the target has {target.num_layers} layers. "
                "The output of the last layer is not read before its norm: the head was made for another model"
            )
        block_format = BlockFormat(**{name: config[name] for name in FORMAT if name in config})
        if block_format.mask_token >= target.num_embeddings:
            raise CheckpointError(
                f"{weights.source} has mask_token_id {block_format.mask_token}; the target has {target.num_embeddings} embeddings"
            )
        weights = _without_equal_head(weights, target)
        parts = {name: config[name] for name in EXTRAS if name in config}
        extras = Extras(**parts, own_head=HEAD in weights.tensors)
        shape, width = layer_shape(config), target.hidden_size * len(layers)
        net = BlockNet(shape, config["layers"], width, target.vocab_size, extras)
        ids = weights.tensors.get(DRAFT_IDS)
        net, embed_tokens = load_head(net, weights, target, {} if ids is None else {DRAFT_IDS: tuple(ids.shape)})
        ids = None if ids is None else ids.to(target.device)
        method = cls(target, options or cls.Options(), net, shape, layers, block_format, embed_tokens, ids)
        method.trained_length = config.get("max_positions")
        return method

    @classmethod
    def random(
        cls, target: Target, options: Any = None, seed: int = 0, counts_V: Tensor | None = None, **shape: Any
    ) -> Self:
        """Return a head with layers of the target's own sizes; `shape` replaces some of them."""
        options = options or cls.Options()
        new, layer = options.head, target_layer_shape(target, **shape)
        layers = fused_layers(new.layers, new.depth, target)
        family = target.family
        block_format = BlockFormat(
            new.block,
            mask_token(new.mask_token, target, counts_V),
            cls.new_from_anchor,
            embed_scale=embed_scale(target),
            logit_scale=family.logit_scale,
            logit_cap=family.softcap or 0.0,
        )
        width, extras = target.hidden_size * len(layers), cls.new_extras(options)
        net = random_net(lambda: BlockNet(layer, new.depth, width, target.vocab_size, extras), target, seed)
        return cls(target, options, net, layer, layers, block_format)

    def weights(self) -> Weights:
        net, block_format = self.net, self.block_format
        config = {
            **layer_config(self.shape),
            "layers": len(net.layers),
            "vocab_size": self.target.vocab_size,
            "max_positions": self.trained_length or self.target.context,
            "act": "silu",
            "feature_layers": self.feature_layers,
            "target_layers": self.target.num_layers,
            **{name: getattr(block_format, name) for name in FORMAT},
            **{name: getattr(net.extras, name) for name in EXTRAS},
        }
        if block_format.embed_scale is None:
            config["embed_scale"] = embed_scale(self.target) if self.embed_tokens is None else 1.0
        if block_format.logit_scale is None:
            family = self.target.family
            config |= {"logit_scale": family.logit_scale, "logit_cap": family.softcap or 0.0}
        saved = saved_head(self.head_format, config, net, self.target, self.embed_tokens)
        ids = {} if self.draft_ids_v is None else {DRAFT_IDS: self.draft_ids_v.cpu()}
        return replace(saved, tensors={**saved.tensors, **ids})

    # --- drafting

    def open(self, rows: int) -> DraftSession:
        return BlockSession(self, rows)

    def embed(self, ids: Tensor) -> Tensor:
        table = self.embed_tokens
        if table is None and not self.own_embed_scale:
            return self.target.embed(ids).to(self.dtype)
        if table is None:
            table = embedding_table(self.target)
        return (table[ids] * (self.block_format.embed_scale or 1.0)).to(self.dtype)

    def head(self, hidden: Tensor, net: Any = None) -> Tensor:
        """Return the logits [..., V] of normed hidden [..., D]. `net`: the one to use, `self.net` by default."""
        lm_head, block_format = (net or self.net).head, self.block_format
        if lm_head is None and not self.own_logit_scale:
            return self.target.head(hidden.to(self.target.dtype))
        if lm_head is None:
            lm_head, hidden = self.target.family.head, hidden.to(self.target.dtype)
        logits: Tensor = lm_head(hidden) * (block_format.logit_scale or 1.0)
        cap = block_format.logit_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def grow(self, hidden_BSD: Tensor, cycle_input: CycleInput) -> Draft:
        """Return the tree below the roots, from the hidden of the slots of its levels."""
        net: BlockNet = self.decoding_net
        logits_BSV = self.head(hidden_BSD, net)

        def level_logits(tokens_BQ: Tensor, level: int) -> Tensor:
            return self.level_logits(net, logits_BSV, hidden_BSD, tokens_BQ, level)

        def expand(tokens_BQ: Tensor, parents_BQV: Tensor, visible_BQT: Tensor, level: int) -> Tensor:
            return level_logits(tokens_BQ, level + 1)

        net_steps = DraftNetSteps(
            lambda: level_logits(cycle_input.tokens_B[:, None], 0)[:, 0],
            lambda logits: logits,
            expand,
            self.draft_ids_v,
        )
        return grow_dynamic(net_steps, cycle_input, self.tree)

    def level_logits(
        self, net: BlockNet, logits_BSV: Tensor, hidden_BSD: Tensor, tokens_BQ: Tensor, level: int
    ) -> Tensor:
        """Return the logits [B, Q, v] of the children of nodes at this depth, given the logits of the slots."""
        logits_BQV = logits_BSV[:, level : level + 1].expand(-1, tokens_BQ.shape[1], -1)
        if net.selector is not None:
            logits_BQV = net.selector(logits_BSV[:, level, None], hidden_BSD[:, level, None], tokens_BQ)
        if net.markov is not None:
            logits_BQV = logits_BQV + net.markov(tokens_BQ).to(logits_BQV.dtype)
        return self.mask_leaves(logits_BQV, hidden_BSD[:, level : level + 1], tokens_BQ)

    def mask_leaves(self, logits_BQV: Tensor, hidden_B1D: Tensor, tokens_BQ: Tensor) -> Tensor:
        """Return the logits, or minus infinity for nodes that shall have no children. Here all nodes may
        have some."""
        return logits_BQV

    def chain(self, depth: int) -> Self:
        """Return the method with a chain, at most as deep as the block."""
        chain = copy(self)
        chain.tree = replace(self.tree, nodes=depth + 1, depth=min(depth, self.block_format.levels), branch=1)
        return chain

    def describe(self) -> dict[str, Any]:
        return {**self.tree.describe(), "block": self.block_format.block}


class BlockSession(DraftSession):
    """The draft's keys and values of B rows, and the features of the tokens accepted last, which it
    has not read yet.

    Slot t of a row holds token t. `length_B` + `pending_B` is the root's position.
    """

    def __init__(self, drafter: BlockMethod, rows: int) -> None:
        target, shape, device = drafter.target, drafter.shape, drafter.target.device
        self.drafter, self.rows = drafter, rows
        self.net: BlockNet = drafter.decoding_net
        sizes = (shape.num_kv_heads, shape.head_dim, shape.head_dim)
        self.cache = KVCache((sizes,) * len(drafter.net.layers), rows, drafter.dtype, device)
        width = target.hidden_size * len(drafter.feature_layers)
        self.pending_BPF = torch.zeros(rows, 1 + drafter.tree.depth, width, dtype=target.dtype, device=device)
        self.pending_B = torch.zeros(rows, dtype=torch.long, device=device)
        self.length_B = torch.zeros_like(self.pending_B)
        self.active_B = torch.zeros(rows, dtype=torch.bool, device=device)  # in the current cycle
        self.state = {name: tuple(getattr(self, name).shape) for name in ("length_B", "pending_B", "pending_BPF")}

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        # the last path came from another drafter and is longer than this recording's
        if self.pending_BPF.shape[1] > self.state["pending_BPF"][1]:
            return None
        block = max(self.drafter.block_format.block, self.state["pending_BPF"][1])
        self.cache.reserve(cycle_input.max_position + max(MARGIN, block))
        return Capturable(self, self.state, self.cache.addresses)

    # --- rows come and go

    def truncate(self, row: int, length: int) -> int:
        kept = min(int(self.length_B[row]), length)
        self.length_B[row] = kept
        return kept

    def copy(self, source: int, row: int, length: int) -> int:
        kept = min(int(self.length_B[source]), length)
        self.cache.copy(source, row, kept)
        self.length_B[row] = kept
        return kept

    def begin(self, row: int, cached_tokens: int, total: int) -> None:
        self.end(row, cached_tokens)
        self.cache.reserve(total)  # once: growing copies what is there

    def end(self, row: int, kept: int = 0) -> None:
        if not kept:
            self.length_B[row] = 0
        self.pending_B[row] = 0

    def clear(self, row: int) -> None:
        self.end(row)
        self.cache.clear(row)
        self.pending_BPF[row] = 0

    def prefill(self, row: int, tokens_T: Tensor, features_TF: Tensor, position: int) -> None:
        """Store the keys and values of the pending tokens, if there are any, and of the chunk's."""
        pending = int(self.pending_B[row])
        features_TF = torch.cat([self.pending_BPF[row, :pending], features_TF])
        first = position - pending
        slot_1T = torch.arange(first, first + len(features_TF), device=features_TF.device)[None]
        self._store_context(range(row, row + 1), features_TF[None], slot_1T, first + len(features_TF))
        self.length_B[row] = first + len(features_TF)
        self.pending_B[row] = 0

    # --- the cycle

    def draft(self, cycle_input: CycleInput) -> Draft:
        self.active_B = cycle_input.active_B
        self._read_pending(cycle_input)
        block_format, levels = self.drafter.block_format, self.drafter.tree.depth
        if cycle_input.tree_size is not None:
            levels = min(levels, cycle_input.tree_size.depth)
        hidden_BnD = self._read_block(cycle_input)
        return self.drafter.grow(hidden_BnD[:, block_format.first_slot : block_format.first_slot + levels], cycle_input)

    def commit(self, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self.pending_BPF = output.features_at(verdict.path_BP)
        # a row that is not active has no pending tokens: its request has ended, or its prompt is
        # being read
        self.pending_B = torch.where(self.active_B, verdict.length_B, 0)

    def _read_pending(self, cycle_input: CycleInput) -> None:
        """Store the pending tokens. They are padded to the longest path, so that shapes do not depend on values."""
        P = self.pending_BPF.shape[1]
        slot_BP = self.length_B[:, None] + torch.arange(P, device=self.length_B.device)
        self._store_context(range(self.rows), self.pending_BPF, slot_BP, cycle_input.max_position + P)
        count_B = self.pending_B * cycle_input.active_B
        self.length_B, self.pending_B = self.length_B + count_B, self.pending_B - count_B

    def _store_context(self, rows: range, features_RTF: Tensor, slot_RT: Tensor, width: int) -> None:
        self.cache.prepare(rows, lambda: slot_RT, width)
        self.net.store_kv(self.net.context(features_RTF.to(self.drafter.dtype)), slot_RT, self._layers())

    def _read_block(self, cycle_input: CycleInput) -> Tensor:
        """Return the net's pass over the block: the normed hidden of its slots [B, n, D]."""
        block_format, roots_B1 = self.drafter.block_format, cycle_input.tokens_B[:, None]
        n, width = block_format.block, cycle_input.max_position + block_format.block
        slot_Bn = self.length_B[:, None] + torch.arange(n, device=roots_B1.device)
        ids_Bn = torch.cat([roots_B1, torch.full_like(roots_B1, block_format.mask_token).expand(-1, n - 1)], dim=1)
        self.cache.prepare(range(self.rows), lambda: slot_Bn, width)
        every_Bnn = torch.ones(self.rows, n, n, dtype=torch.bool, device=roots_B1.device)
        mask_BnW = slot_mask(self.length_B, every_Bnn, self.cache.width)
        shown = [block_format.visible(layer, self.length_B, self.cache.width) for layer in range(len(self.net.layers))]
        masks = [(mask_BnW if shown_BnW is None else mask_BnW & shown_BnW)[:, None] for shown_BnW in shown]
        return self.net(self.drafter.embed(ids_Bn), slot_Bn, self._layers(), masks)  # type: ignore[no-any-return]

    def _layers(self) -> list[Any]:
        return [self.cache.layer_view(layer) for layer in range(len(self.drafter.net.layers))]


def fused_layers(layers: str, depth: int, target: Target) -> tuple[int, ...]:
    """Return the hidden_states that a new head fuses: those named, or as many as it has layers, evenly
    from layer 1's output to L-3's."""
    L = target.num_layers
    if layers == "auto":
        if L < 4:
            raise FitError(
                f"a block head fuses the outputs of layers 1 to L-3, but this target has {L}: pass layers with --head.layers"
            )
        evenly = [L // 2] if depth == 1 else [round(1 + i * (L - 4) / (depth - 1)) for i in range(depth)]
        return tuple(sorted({i + 1 for i in evenly}))
    return layer_numbers(layers, target)


def embedding_table(target: Target) -> Tensor:
    """Return the target's table of embeddings [V, D], before any factor."""
    table = target.family.embedding.weight
    assert isinstance(table, Tensor)
    gathered = getattr(table, "full_tensor", None)  # of a table that is split over processes
    return table.detach() if gathered is None else gathered().detach()


@torch.no_grad()
def embed_scale(target: Target) -> float:
    """Return the factor between the target's table and the input of its first layer."""
    ids = torch.arange(min(64, target.num_embeddings), device=target.device)
    raw, read = (x.float().norm() for x in (embedding_table(target)[ids], target.embed(ids)))
    factor = float(read / raw) if raw else 1.0
    return 1.0 if abs(factor - 1) < 1e-3 else factor


def _without_equal_head(weights: Weights, target: Target) -> Weights:
    """Return the weights without an lm_head that is the target's, up to the rounding of storage."""
    ours, theirs = weights.tensors.get(HEAD), getattr(target.family.head, "weight", None)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return weights
    if not torch.allclose(ours.to(theirs.device, theirs.dtype), theirs, rtol=1e-2, atol=1e-3):
        return weights
    return replace(weights, tensors={name: value for name, value in weights.tensors.items() if name != HEAD})
