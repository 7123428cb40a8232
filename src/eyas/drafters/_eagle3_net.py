"""The net of EAGLE-3 (section 3, figure 5): its forward for decoding, and the steps of the training-time test.

This module knows no tree, no target and no loss. Letters: R rows, N nodes or packed tokens, M of them that count, D hidden, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eyas.nn import DecoderLayer, Documents, DraftCache, Keys, LayerShape, RMSNorm, join_normed

__all__ = ["Architecture", "Net"]


@dataclass(frozen=True)
class Architecture:
    """The options in which published EAGLE-3 heads differ, beside the sizes of their layer."""

    feature_size: int  # width of the features of one target layer
    num_features: int = 3  # number of fused target layers
    draft_vocab_size: int = 0  # 0: no head of its own, logits come from the target's lm_head
    fc_bias: bool = False
    fc_norm: bool = False  # EAGLE-3.1: a norm for the features of each layer before fc
    norm_before_fc: bool = False  # one norm over the concatenated features before fc
    norm_before_residual: bool = False  # the residual stream starts from the normed hidden
    carries_normed: bool = False  # EAGLE-3.1: the next step reads the normed hidden


class Layer(DecoderLayer):
    """A decoder layer that reads the normed embedding beside the normed hidden."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.embed_norm, self.hidden_norm = (RMSNorm(shape.hidden_size, shape.rms_eps) for _ in range(2))


class Net(nn.Module):
    """fc over the fused features, a layer over [embedding, hidden], norm and head (EAGLE-3, figure 5)."""

    def __init__(self, shape: LayerShape, plan: Architecture) -> None:
        super().__init__()
        D, F = shape.hidden_size, plan.feature_size * plan.num_features
        self.plan = plan
        self.fc = nn.Linear(F, D, bias=plan.fc_bias)
        self.fc_norm = nn.ModuleList(RMSNorm(plan.feature_size, shape.rms_eps) for _ in range(plan.num_features)) if plan.fc_norm else None
        self.input_norm = RMSNorm(F, shape.rms_eps) if plan.norm_before_fc else None
        self.layer = Layer(shape)
        self.norm = RMSNorm(D, shape.rms_eps)
        self.head = nn.Linear(D, plan.draft_vocab_size, bias=False) if plan.draft_vocab_size else None

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def join(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention [..., 2D], and the residual to which its output is added [..., D]."""
        joined = join_normed(self.layer.embed_norm, embeddings, self.layer.hidden_norm, hidden)
        return joined, joined[..., embeddings.shape[-1] :] if self.plan.norm_before_residual else hidden

    def handed_on(self, hidden: Tensor) -> Tensor:
        """The hidden that the next step reads."""
        return self.norm(hidden) if self.plan.carries_normed else hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of the head, from the hidden that `forward` returned."""
        normed: Tensor = hidden if self.plan.carries_normed else self.norm(hidden)
        return normed

    def remember(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        self.layer.attention.store(self.join(hidden_RND, embeddings_RND)[0], position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """The next hidden [R, N, D]."""
        x_RND, residual_RND = self.join(hidden_RND, embeddings_RND)
        return self.handed_on(self.layer.decode(x_RND, residual_RND, position_RN, cache))

    def training_time_test(
        self, features_NF: Tensor, embed: Callable[[Tensor], Tensor], rows_M: Tensor, documents: Documents, steps: int,
        gradient_checkpointing: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """The hidden [M, D] at the slots `rows_M` after each step of the training-time test.

        Args:
            embed: index of a packed token [M] -> its embedding [M, D].
            rows_M: int64, ascending; the other slots give keys and values only.
            gradient_checkpointing: keep only inputs, keys and values of a step; recompute the rest in the backward pass.
        """
        N, attention = len(features_NF), self.layer.attention
        position_N, queries = documents.position_N(features_NF.device), documents.query_rows(rows_M)
        fused_ND = self.fuse(features_NF)
        x_ND, residual_ND = self.join(fused_ND, embed((torch.arange(N, device=features_NF.device) + 1).clamp(max=N - 1)))
        first: Keys = attention.keys(x_ND, position_N)
        x_MD, residual_MD = x_ND[rows_M], residual_ND[rows_M]
        later, hidden = list[Keys](), list[Tensor]()  # keys and values of steps 1, 2, ...; hidden of steps 0, 1, ...

        def attend(x_MD: Tensor, residual_MD: Tensor, i: int) -> Tensor:
            attended_MD = attention.attend_packed(x_MD, position_N[rows_M] + i, queries, first, later[:i])
            return self.handed_on(self.layer.finish(residual_MD, attended_MD))

        for i in range(steps):
            if i:
                x_MD, residual_MD = self.join(hidden[-1], embed((rows_M + 1 + i).clamp(max=N - 1)))
                later.append(attention.keys(x_MD, position_N[rows_M] + i))
            hidden.append(
                checkpoint(attend, x_MD, residual_MD, i, use_reentrant=False) if gradient_checkpointing else attend(x_MD, residual_MD, i)
            )
        return hidden
