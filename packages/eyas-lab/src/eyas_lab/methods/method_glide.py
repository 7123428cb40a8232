"""glide: GliDe (Du et al. 2024, arXiv 2402.02082): a draft layer that attends to the target's own keys and values.

    embedding of a token -> attention to all tokens up to it -> cross-attention to the keys and values of the target's last
    attention layer -> MLP -> norm -> lm_head of the target -> q

**Cross-attention** (section 3.1). The target has keys of the committed tokens only, so all nodes of a tree see these. In
training a token is at a random place of a block of draft tokens, and sees the keys from before the block (the block-wise
mask of section 3.2). Queries are rotated as the target's keys are. Keys and values of the layer's own attention follow
from the embeddings alone. EAGLE's session holds them, one slot earlier than the target, as it holds EAGLE's pairs.

**CaPE** (section 3.3) verifies more candidates where the draft is uncertain. EAGLE-2's dynamic tree does so here (--tree.*).

Letters: R rows, N nodes, S slots of a text, T tokens, M tokens that count, D hidden, K key-value heads, G query heads for
each, H heads, h and w sizes of a key and of a value, W slots of the target's cache, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from eyas import elsewhere
from eyas.checkpoints import Weights
from eyas.core.cache import additive_mask
from eyas.core.drafter import Capturable, CycleInput, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft
from eyas.drafters import Batch, Loss
from eyas.drafters.tools import (
    DynamicEagle,
    DynamicTree,
    EagleSession,
    Window,
    check_head,
    layer_config,
    layer_shape,
    load_tensors,
    random_net,
    saved_head,
    source_layers,
    target_layer_shape,
    target_sizes,
)
from eyas.nn import DecoderLayer, DraftCache, LayerShape, RMSNorm, grouped_attention, rope, rope_frequencies

__all__ = ["Method", "Net", "Options", "Seen"]

BLOCK = 5  # draft tokens of a block in training


@dataclass(frozen=True)
class Options:
    """Options of glide."""

    tree: DynamicTree = field(default_factory=DynamicTree)
    window: Window = field(default_factory=Window)


class Seen(NamedTuple):
    """The target's keys and values, and the additive mask by which nodes attend to them."""

    key_RKWh: Tensor
    value_RKWw: Tensor
    mask_R1NW: Tensor


class CrossAttention(nn.Module):
    """Attention to keys and values that the target has stored."""

    def __init__(self, shape: LayerShape, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        K, h, w = sizes
        self.heads, self.shape = (
            K * max(1, shape.num_heads // K),
            LayerShape(0, 0, 1, 1, h, rope_theta=shape.rope_theta),
        )
        self.q = nn.Linear(shape.hidden_size, self.heads * h, bias=False)
        self.o = nn.Linear(self.heads * w, shape.hidden_size, bias=False)

    def forward(self, x_RND: Tensor, position_RN: Tensor, seen: Seen) -> Tensor:
        """Return attention from the drafted tokens to the target's keys and values."""
        q_RNHh = self.q(x_RND).unflatten(-1, (self.heads, -1))
        q_RNHh = rope(q_RNHh, position_RN, rope_frequencies(self.shape, x_RND.device))
        key, value, mask = (part.to(q_RNHh.dtype) for part in seen)
        return self.o(grouped_attention(q_RNHh.transpose(1, 2), key, value, mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    """One layer with cross-attention. Of EAGLE's pairs it reads the tokens, not the features."""

    def __init__(self, shape: LayerShape, sizes: tuple[int, int, int]) -> None:
        super().__init__()
        self.input_norm, self.cross_norm, self.norm = (RMSNorm(shape.hidden_size, shape.rms_eps) for _ in range(3))
        self.layer, self.cross = DecoderLayer(shape), CrossAttention(shape, sizes)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features as they are."""
        return features

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        """Write the keys and values of the net's own layer for these positions into the cache."""
        self.layer.attention.store(self.input_norm(embeddings_RND), position_RN, cache)

    def forward(self, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache, seen: Seen) -> Tensor:
        """Return the input of the target's lm_head [R, N, D]."""
        hidden_RND = embeddings_RND + self.layer.attention(self.input_norm(embeddings_RND), position_RN, cache)
        crossed_RND = self.cross(self.cross_norm(hidden_RND), position_RN, seen)
        return self.norm(self.layer.finish(hidden_RND, crossed_RND))  # type: ignore[no-any-return]


class Session(EagleSession):
    """EAGLE's session, which shows the net the target's cache."""

    drafter: Method
    seen: Seen  # in the current cycle

    def capturable(self, cycle_input: CycleInput) -> Capturable | None:
        return None

    def draft(self, cycle_input: CycleInput) -> Draft:
        cache, position_B = cycle_input.target_cache, cycle_input.position_B
        assert cache is not None, "the cycle input needs `target_cache`"
        device = position_B.device
        key, value = cache.read_committed(self.drafter.source_layer, max(1, cycle_input.max_position))
        allowed_BW = torch.arange(key.shape[2], device=device) < position_B[:, None]
        mask_BW = additive_mask(allowed_BW, self.drafter.dtype)
        dtype = self.drafter.dtype
        self.seen = Seen(key.to(device, dtype), value.to(device, dtype), mask_BW[:, None, None])
        return super().draft(cycle_input)

    def run_net(self, hidden: Tensor, embeddings: Tensor, position_BN: Tensor) -> Tensor:
        mask_B1NW = self.seen.mask_R1NW.expand(-1, -1, position_BN.shape[1], -1)
        seen = self.seen._replace(mask_R1NW=mask_B1NW)
        return self.drafter.decoding_net(embeddings, position_BN, self.cache, seen)  # type: ignore[no-any-return]


class WholeTexts(NamedTuple):
    """The cache of a layer in training: all slots of each text."""

    mask_R1NW: Tensor

    def store(
        self, key_RSKh: Tensor, value_RSKh: Tensor, position_RS: Tensor, frequency_h: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return keys, rotated to their positions, and values of whole texts."""
        return rope(key_RSKh, position_RS, frequency_h).transpose(1, 2), value_RSKh.transpose(1, 2)


class Method(DynamicEagle):
    """One layer that sees the target's keys and values, and a dynamic tree."""

    Options: ClassVar[type] = Options
    summary = "GliDe: one layer that attends to the target's own keys and values, dynamic tree"
    head_format = "glide"
    net: Net
    fused_tree_builder = compiled = None  # their nets see no other cache

    def __init__(self, target: Target, options: Any, net: Net, shape: LayerShape) -> None:
        super().__init__(target, options)
        self.net, self.shape, self.feature_layers = net, shape, (target.num_layers,)
        self.source_layer = max(source_layers(target).values())
        self.check_window(self.options.window)

    @classmethod
    def _net(cls, target: Target, shape: LayerShape) -> Net:
        sizes = target.layout[max(source_layers(target).values())]
        assert sizes is not None
        return Net(shape, sizes)

    @classmethod
    def load(cls, weights: Weights | None, target: Target, options: Any = None) -> Self:
        """Raise CheckpointError unless the layer is for a target of these sizes."""
        weights = check_head(weights, cls.head_format, "GliDe", target_sizes(target))
        shape = layer_shape(weights.config)
        return cls(target, options, load_tensors(cls._net(target, shape), weights, target), shape)

    @classmethod
    def random(cls, target: Target, options: Any = None, seed: int = 0) -> Self:
        shape = target_layer_shape(target)
        return cls(target, options, random_net(lambda: cls._net(target, shape), target, seed), shape)

    def weights(self) -> Weights:
        config = {**layer_config(self.shape), "vocab_size": self.target.vocab_size}
        return saved_head(self.head_format, config, self.net, self.target)

    def open(self, rows: int) -> DraftSession:
        return Session(self, rows)

    def head(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden.to(self.target.dtype))

    def loss(self, batch: Batch, generator: torch.Generator | None = None) -> Loss:
        """Return the cross-entropy from the target's distribution to the draft's (section 3.2), at every token whose
        successor counts. Slot s reads token s + 1, and predicts token s + 2."""
        training, lengths, device = elsewhere.part("losses", "training"), batch.documents.lengths, batch.tokens_N.device
        parts = (batch.tokens_N, batch.features_NF, batch.counted_N)
        tokens_RT, features_RTF, counted_RT = (
            pad_sequence(list(torch.split(x, list(lengths))), batch_first=True) for x in parts
        )
        (R, T), slot_S = tokens_RT.shape, torch.arange(tokens_RT.shape[1] - 1, device=device)
        offset_R1 = torch.randint(BLOCK, (R, 1), generator=generator).to(device)
        last_RS = slot_S - (slot_S + offset_R1) % BLOCK  # the newest token before the block
        allowed_RST = torch.arange(T, device=device) <= last_RS[..., None].clamp(min=0)
        cache, argument = DynamicCache(), self.target.family.cache_argument
        with torch.no_grad(), self.target.tap(()):
            self.target.family.base(input_ids=tokens_RT, use_cache=True, **{argument: cache})
        layer: Any = cache.layers[self.source_layer]
        seen = Seen(layer.keys, layer.values, additive_mask(allowed_RST, self.dtype)[:, None])
        causal = WholeTexts((slot_S[:, None] >= slot_S)[None, None].expand(R, 1, -1, -1))
        embeddings_RSD = self.target.embed(tokens_RT[:, 1:]).to(self.dtype)
        hidden_RSD = self.net(embeddings_RSD, slot_S.expand(R, -1), causal, seen)
        counts_RS = counted_RT[:, 2:]  # padding does not count
        hidden_MD, true_MD = hidden_RSD[:, :-1][counts_RS], features_RTF[:, 1:-1][counts_RS]
        total, right = training.soft_cross_entropy_of(self.head, hidden_MD, true_MD, self.target.vocab_size)
        return Loss(total, torch.tensor(len(hidden_MD), device=device), {"accuracy": right})
