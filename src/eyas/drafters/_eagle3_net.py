"""The net of EAGLE-3 (section 3, figure 5): its forward for decoding, and the steps of the
training-time test.

This module knows no tree, no target and no loss. Letters: R rows, N nodes or packed tokens, M of
them that count, D hidden, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.nn import DecoderLayer, Documents, DraftCache, KeysValues, LayerShape, QueryRows, RMSNorm, join_normed

__all__ = ["Architecture", "Net", "PackedPasses", "ParallelNet"]


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

    def training_time_test(
        self, features_NF: Tensor, embed: Callable[[Tensor], Tensor], rows_M: Tensor, documents: Documents, steps: int,
        gradient_checkpointing: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Return the hidden [M, D] at the slots `rows_M` after each step of the training-time test.

        Args:
            embed: index of a packed token [M] -> its embedding [M, D].
            rows_M: int64, ascending; the other slots give keys and values only.
            gradient_checkpointing: keep only inputs, keys and values of a step; recompute the rest
                in the backward pass.
        """
        N, device = len(features_NF), features_NF.device
        passes = PackedPasses(self, rows_M, documents, device, gradient_checkpointing)
        hidden_MD = passes.first(
            *self.join(self.fuse(features_NF), embed((torch.arange(N, device=device) + 1).clamp(max=N - 1)))
        )
        hidden = [self.next_input(hidden_MD)]  # after steps 0, 1, ...
        for i in range(1, steps):
            x_MD, residual_MD = self.join(hidden[-1], embed((rows_M + 1 + i).clamp(max=N - 1)))
            hidden.append(self.next_input(passes.next(x_MD, residual_MD)))
        return hidden


class ParallelNet(Net):
    """A net that also reads masks, which stand for features and tokens not known yet (P-EAGLE, arXiv 2602.01469)."""

    def __init__(self, shape: LayerShape, architecture: Architecture) -> None:
        super().__init__(shape, architecture)
        # in place of the target's features
        self.mask_hidden = nn.Parameter(torch.randn(architecture.feature_size * architecture.num_features))

    def in_parallel(
        self, features_NF: Tensor, embed: Callable[[Tensor], Tensor], mask_D: Tensor, rows_M: Tensor, documents: Documents, steps: int,
        gradient_checkpointing: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Return the hidden [M, D] at the slots `rows_M`, and at each of the masks after them."""
        N, device = len(features_NF), features_NF.device
        passes = PackedPasses(self, rows_M, documents, device, gradient_checkpointing)
        following_ND = embed((torch.arange(N, device=device) + 1).clamp(max=N - 1))
        hidden = [self.next_input(passes.first(*self.join(self.fuse(features_NF), following_ND)))]
        mask_1D = self.fuse(self.mask_hidden[None])
        x_1D, residual_1D = self.join(mask_1D, mask_D[None])
        x_MD, residual_MD = (one.expand(len(rows_M), -1) for one in (x_1D, residual_1D))
        return hidden + [self.next_input(passes.next(x_MD, residual_MD)) for _ in range(1, steps)]


class PackedPasses:
    """Passes of a net over packed documents, for training: the first over all slots, the next ones
    over the query rows M.

    In pass i (0, 1, ...) the position of a row is its slot's position plus i. It attends to the first pass's keys
    up to its slot, and to the keys of passes 1..i at its own slot.
    """

    def __init__(
        self, net: Net, rows_M: Tensor, documents: Documents, device: torch.device, gradient_checkpointing: bool
    ) -> None:
        self.layers: list[DecoderLayer] = [net.layer, *net.later_layers]
        self.norms = [layer.input_norm for layer in net.later_layers]
        self.rows_M, self.documents, self.gradient_checkpointing = rows_M, documents, gradient_checkpointing
        self.position_N = documents.position_N(device)
        self.queries = documents.query_rows(rows_M)
        self.keys = list[KeysValues]()  # keys and values of the first pass, by layer
        self.later: list[list[KeysValues]] = [[] for _ in self.layers]  # keys and values of later passes, by layer

    def first(self, x_ND: Tensor, residual_ND: Tensor) -> Tensor:
        """Return the hidden [M, D] at the query rows. Layers before the last are computed at all slots, as
        the next one makes keys of them."""
        for number, layer in enumerate(self.layers[:-1]):
            self.keys.append(layer.attention.rotated_key_value(x_ND, self.position_N))
            every = self.documents.query_rows(torch.arange(len(x_ND), device=x_ND.device))
            residual_ND = self._compute(layer, x_ND, residual_ND, self.position_N, every, self.keys[-1], [])
            x_ND = self.norms[number](residual_ND)
        layer, rows_M = self.layers[-1], self.rows_M
        self.keys.append(layer.attention.rotated_key_value(x_ND, self.position_N))
        return self._compute(
            layer, x_ND[rows_M], residual_ND[rows_M], self.position_N[rows_M], self.queries, self.keys[-1], []
        )

    def next(self, x_MD: Tensor, residual_MD: Tensor) -> Tensor:
        """Return the hidden [M, D] after one more pass."""
        position_M = self.position_N[self.rows_M] + len(self.later[0]) + 1
        for number, (layer, keys, later) in enumerate(zip(self.layers, self.keys, self.later, strict=True)):
            if number:
                x_MD = self.norms[number - 1](residual_MD)
            later.append(layer.attention.rotated_key_value(x_MD, position_M))
            residual_MD = self._compute(layer, x_MD, residual_MD, position_M, self.queries, keys, list(later))
        return residual_MD

    def _compute(
        self,
        layer: DecoderLayer,
        x_MD: Tensor,
        residual_MD: Tensor,
        position_M: Tensor,
        queries: QueryRows,
        keys: KeysValues,
        later: list[KeysValues],
    ) -> Tensor:
        def compute(x_MD: Tensor, residual_MD: Tensor) -> Tensor:
            return layer.finish(residual_MD, layer.attention.attend_packed(x_MD, position_M, queries, keys, later))

        if self.gradient_checkpointing:
            recomputed: Tensor = checkpoint(compute, x_MD, residual_MD, use_reentrant=False)
            return recomputed
        return compute(x_MD, residual_MD)
