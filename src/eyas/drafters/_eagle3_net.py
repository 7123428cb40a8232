"""The net of EAGLE-3 (section 3, figure 5).

This module knows no tree, no target and no loss. Letters: R rows, N nodes, D hidden, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from eyas.nn import DecoderLayer, DraftCache, LayerShape, RMSNorm, join_normed

__all__ = ["Architecture", "Net", "ParallelNet"]


@dataclass(frozen=True)
class Architecture:
    """The options in which published EAGLE-3 heads differ, besides the sizes of their layer."""

    feature_size: int  # width of the features of one target layer
    num_features: int = 3  # number of fused target layers
    draft_vocab_size: int = 0  # 0: no head of its own, logits come from the target's lm_head
    fc_bias: bool = False
    fc_norm: bool = False  # EAGLE-3.1: a norm for the features of each layer before fc
    norm_before_fc: bool = False  # one norm over the concatenated features before fc
    norm_before_residual: bool = False  # the residual stream starts from the normed hidden
    norm_output: bool = False  # EAGLE-3.1: the next step reads the normed hidden
    layers: int = 1  # decoder layers; those after the first read hidden states only


class Layer(DecoderLayer):
    """A decoder layer that reads the normed embedding and the normed hidden, concatenated."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.embed_norm, self.hidden_norm = (RMSNorm(shape.hidden_size, shape.rms_eps) for _ in range(2))


class LaterLayer(DecoderLayer):
    """A decoder layer after the first: it reads the normed hidden only, as any LLaMA layer does."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.input_norm = RMSNorm(shape.hidden_size, shape.rms_eps)


class LayeredCache(DraftCache, Protocol):
    """A draft cache of several layers; as a `DraftCache` it is the cache of the first."""

    def draft_layer(self, number: int) -> DraftCache: ...


class Net(nn.Module):
    """fc over the fused features, a layer over [embedding, hidden], further layers, norm and head
    (EAGLE-3, figure 5)."""

    def __init__(self, shape: LayerShape, architecture: Architecture) -> None:
        super().__init__()
        D, F = shape.hidden_size, architecture.feature_size * architecture.num_features
        self.architecture = architecture
        self.fc = nn.Linear(F, D, bias=architecture.fc_bias)
        norms = (RMSNorm(architecture.feature_size, shape.rms_eps) for _ in range(architecture.num_features))
        self.fc_norm = nn.ModuleList(norms) if architecture.fc_norm else None
        self.input_norm = RMSNorm(F, shape.rms_eps) if architecture.norm_before_fc else None
        self.layer = Layer(shape)
        self.later = nn.ModuleList(LaterLayer(shape) for _ in range(architecture.layers - 1))
        self.norm = RMSNorm(D, shape.rms_eps)
        self.head = nn.Linear(D, architecture.draft_vocab_size, bias=False) if architecture.draft_vocab_size else None

    def fc_input(self, features: Tensor) -> Tensor:
        """Return the input of fc: the features [..., F], with the norms that are before it."""
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return features

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.fc_input(features))  # type: ignore[no-any-return]

    def join(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [..., 2D], and the residual to which its output is added [..., D]."""
        joined = join_normed(self.layer.embed_norm, embeddings, self.layer.hidden_norm, hidden)
        return joined, joined[..., embeddings.shape[-1] :] if self.architecture.norm_before_residual else hidden

    def next_input(self, hidden: Tensor) -> Tensor:
        """Return the hidden that the next step reads."""
        return self.norm(hidden) if self.architecture.norm_output else hidden

    def head_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the head, from the hidden that `forward` returned."""
        return hidden if self.architecture.norm_output else self.norm(hidden)

    @property
    def later_layers(self) -> list[LaterLayer]:
        return [layer for layer in self.later if isinstance(layer, LaterLayer)]

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: LayeredCache) -> None:
        x_RND, residual_RND = self.join(hidden_RND, embeddings_RND)
        last: DecoderLayer = self.layer
        # all layers but the last are computed; of the last, only keys and values are stored
        for number, layer in enumerate(self.later_layers):
            residual_RND = last.decode(x_RND, residual_RND, position_RN, cache.draft_layer(number))
            last, x_RND = layer, layer.input_norm(residual_RND)
        last.attention.store(x_RND, position_RN, cache.draft_layer(len(self.later)))

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: LayeredCache) -> Tensor:
        """Return the next hidden [R, N, D]."""
        x_RND, residual_RND = self.join(hidden_RND, embeddings_RND)
        out_RND = self.layer.decode(x_RND, residual_RND, position_RN, cache)
        for number, layer in enumerate(self.later_layers, start=1):
            out_RND = layer.decode(layer.input_norm(out_RND), out_RND, position_RN, cache.draft_layer(number))
        return self.next_input(out_RND)


class ParallelNet(Net):
    """A net that also reads masks, which stand for features and tokens not known yet (P-EAGLE, arXiv 2602.01469)."""

    def __init__(self, shape: LayerShape, architecture: Architecture) -> None:
        super().__init__(shape, architecture)
        # in place of the target's features
        self.mask_hidden = nn.Parameter(torch.randn(architecture.feature_size * architecture.num_features))
