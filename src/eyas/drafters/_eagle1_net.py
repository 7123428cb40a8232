"""The net of EAGLE-1 and EAGLE-2 (EAGLE-1, figure 7), and the nets of its ablation (figure 10),
which differ in their input at slot t:

    shifted      [ embedding of token t+1 ; feature of token t ]     EAGLE: the feature, and the token that was sampled after it
    unshifted    [ embedding of token t   ; feature of token t ]     does not know token t+1, so all siblings get the same children
    feature      feature of token t                                  does not know token t+1 either
    token        embedding of token t+1                              a language model of one layer

All of them predict the feature of token t+1. `fc` projects two concatenated inputs to one width;
nothing else differs. This module knows no tree, no target and no loss.
Letters: R rows, N nodes or packed tokens, M of them that count, D hidden (unshifted: see `Net`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eyas.nn import DecoderLayer, Documents, DraftCache, LayerShape

__all__ = ["INPUTS", "Net"]

INPUTS = ("shifted", "unshifted", "feature", "token")


class Net(nn.Module):
    """fc over the inputs, then one decoder layer. In the tree a step reads the hidden of the step
    before: its predicted feature.

    The unshifted net reads the token's own embedding too, so its hidden is [embedding ; predicted
    feature], of width 2D.
    """

    def __init__(self, shape: LayerShape, fc_bias: bool = True, inputs: str = "shifted") -> None:
        super().__init__()
        D, joined = shape.hidden_size, inputs in ("shifted", "unshifted")
        self.inputs = inputs
        self.fc = nn.Linear(2 * D, D, bias=fc_bias) if joined else nn.Identity()
        self.layer = DecoderLayer(shape)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def join(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the decoder layer [..., D]. `embeddings` belong to tokens t+1."""
        read = {"shifted": (embeddings, hidden), "unshifted": (hidden,), "feature": (hidden,), "token": (embeddings,)}[
            self.inputs
        ]
        joined: Tensor = self.fc(torch.cat(read, dim=-1))
        return joined

    def store_kv(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> None:
        self.layer.attention.store(self.join(hidden_RND, embeddings_RND), position_RN, cache)

    def forward(self, hidden_RND: Tensor, embeddings_RND: Tensor, position_RN: Tensor, cache: DraftCache) -> Tensor:
        """Return the next hidden [R, N, D]."""
        x_RND = self.join(hidden_RND, embeddings_RND)
        feature_RND = self.layer.decode(x_RND, x_RND, position_RN, cache)
        return torch.cat([embeddings_RND, feature_RND], dim=-1) if self.inputs == "unshifted" else feature_RND

    def packed(self, hidden_ND: Tensor, embeddings_ND: Tensor, rows_M: Tensor, documents: Documents) -> Tensor:
        """Return, for training, the predicted features [M, D] at the slots `rows_M` of packed documents."""
        x_ND, position_N = self.join(hidden_ND, embeddings_ND), documents.position_N(hidden_ND.device)
        attention, x_MD = self.layer.attention, x_ND[rows_M]
        keys = attention.rotated_key_value(x_ND, position_N)
        return self.layer.finish(
            x_MD, attention.attend_packed(x_MD, position_N[rows_M], documents.query_rows(rows_M), keys)
        )
