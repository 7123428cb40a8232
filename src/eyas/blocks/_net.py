"""The net of block drafters (DFlash, DFlash 2, DSpark): layers of Qwen3's kind whose queries are the tokens
of a block only.

    context   features of the committed tokens  --fc, hidden_norm-->  keys and values of every layer, computed once
    block     embeddings of [root, mask, mask, ...]  -->  layers  -->  norm  -->  hidden of each slot

The queries of a block attend to the whole context and to all slots of their own block, also later ones. In some
heads layers have a window, or see earlier slots only (`BlockFormat.visible`). The context has no queries: its
keys and values depend on the target's features alone. This module knows no tree, no target and no loss.

Letters: R rows, A blocks, n slots of a block, T tokens, N packed tokens, M slots of all blocks, K
key-value heads, W slots of the cache, D hidden, h head size, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.core.cache import LayerCache
from eyas.errors import OptionError
from eyas.nn import Attention, LayerShape, RMSNorm, SwiGLU, grouped_attention

__all__ = ["BlockFormat", "BlockNet", "Extras", "Selector"]


@dataclass(frozen=True)
class Extras:
    """The parts of a net beyond plain layers; the default is DFlash's net."""

    markov_rank: int = 0  # width of the Markov head; 0: none
    confidence: str = "none"  # what the confidence head reads: none (there is no such head), hidden, or hidden+markov
    own_head: bool = False  # whether the logits come from an lm_head of the net's own
    draft_vocab: int = 0  # tokens of that lm_head; 0: the target's
    taps: int = 0  # slots that a convolution reads (DFlash 2); 0: there are none
    group: int = 0  # channels that share the weights which a convolution makes
    selector_rank: int = 0  # width of the selector (DFlash 2); 0: there is none
    candidates: int = 0  # tokens of the highest logits that the selector scores


@dataclass(frozen=True)
class BlockFormat:
    """The facts of a block head that no tensor shows."""

    block: int  # slots, the root's included
    mask_token: int
    from_anchor: bool  # slot i predicts the next token, not the one at its own place
    windows: tuple[int | None, ...] = ()  # the sliding window of each layer in tokens; (): no layer has one
    causal: tuple[bool, ...] = ()  # whether the slots of a block see earlier slots only, in each layer; (): no
    anchored: bool = False  # windows are counted from the root for all slots, and hide no slot of the block
    embed_scale: float | None = None  # factor of the embeddings; None: as the target's first layer reads them
    logit_scale: float | None = None  # factor of the logits; None: scale and cap are the target's
    logit_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0: they do not

    @property
    def is_plain(self) -> bool:
        """Whether all slots see everything."""
        return not any(self.windows) and not any(self.causal)

    def visible(self, layer: int, length_B: Tensor, width: int) -> Tensor | None:
        """Return bool [B, n, W]: the slots that a layer's window and order show to each slot of the block, which
        begins at `length_B`; None: all."""
        window = self.windows[layer] if self.windows else None
        causal = bool(self.causal) and self.causal[layer]
        if window is None and not causal:
            return None
        slot_W, root_B11 = torch.arange(width, device=length_B.device), length_B[:, None, None]
        apart_BnW = root_B11 + torch.arange(self.block, device=length_B.device)[:, None] - slot_W
        shown_BnW = apart_BnW >= 0 if causal else torch.ones_like(apart_BnW, dtype=torch.bool)
        if window is None:
            return shown_BnW
        if self.anchored:
            return shown_BnW & (root_B11 - slot_W <= window)
        return shown_BnW & (apart_BnW.abs() < window)

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first level."""
        return 0 if self.from_anchor else 1

    @property
    def levels(self) -> int:
        return self.block - self.first_slot


class BlockAttention(Attention):
    """Attention with norms over each head of queries and keys (Qwen3)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(replace(shape, qk_norm=True))

    def attend_cached(self, x_RnD: Tensor, position_Rn: Tensor, store: LayerCache, mask_R1nW: Tensor) -> Tensor:
        """Return the attention of the blocks to the slots that the mask shows, after their own keys and values are
        stored."""
        k_RnKh, v_RnKh = self.rotated_key_value(x_RnD, position_Rn)
        k_RKWh, v_RKWh = store.update(k_RnKh.transpose(1, 2), v_RnKh.transpose(1, 2))
        out_RHnh = grouped_attention(self.query(x_RnD, position_Rn).transpose(1, 2), k_RKWh, v_RKWh, mask_R1nW)
        return self.o(out_RHnh.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Convolution(nn.Module):
    """Convolutions around a part of a layer, along the slots of a block (DFlash 2): a slot's channels are
    summed with the channels of the slots before it. The weights are learned numbers plus the product of a
    matrix and the slot itself."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        if size % group:
            raise OptionError(
                f"groups of {group} channels do not divide the width {size}: choose another head.channels"
            )
        self.taps, self.group = taps, group
        self.base = nn.Parameter(torch.zeros(2, taps, size))
        nn.init.ones_(self.base[:, 0])  # before and after the part
        self.kernel = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def before(self, x_RnD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the part, and the weights [R, n, taps, D] for its output."""
        made_Rn2KG = self.kernel(x_RnD).unflatten(-1, (2, self.taps, -1))
        weights_Rn2KD = self.base + made_Rn2KG.repeat_interleave(self.group, dim=-1)
        return self._convolved(x_RnD, weights_Rn2KD[:, :, 0]), weights_Rn2KD[:, :, 1]

    def after(self, x_RnD: Tensor, weights_RnKD: Tensor) -> Tensor:
        return self._convolved(x_RnD, weights_RnKD)

    def _convolved(self, x_RnD: Tensor, weights_RnKD: Tensor) -> Tensor:
        slots = x_RnD.shape[1]
        padded = F.pad(x_RnD, (0, 0, self.taps - 1, 0))
        return sum(  # type: ignore[return-value]
            padded[:, self.taps - 1 - tap : self.taps - 1 - tap + slots] * weights_RnKD[:, :, tap]
            for tap in range(self.taps)
        )


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3's kind; with DFlash 2's convolutions around its parts if `taps` is not 0."""

    def __init__(self, shape: LayerShape, taps: int = 0, group: int = 0) -> None:
        super().__init__()
        self.attention_conv, self.mlp_conv = (
            Convolution(shape.hidden_size, taps, group) if taps else None for _ in range(2)
        )
        self.attention, self.mlp = BlockAttention(shape), SwiGLU(shape)
        self.input_norm, self.mlp_norm = (RMSNorm(shape.hidden_size, shape.rms_eps) for _ in range(2))

    def forward(self, hidden_RnD: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layer's output for the slots of blocks. `attend`: the attention of its normed input [R, n, D]."""
        hidden_RnD = hidden_RnD + _convolved(self.attention_conv, attend, self.input_norm(hidden_RnD))
        return hidden_RnD + _convolved(self.mlp_conv, self.mlp, self.mlp_norm(hidden_RnD))


def _convolved(convolution: Convolution | None, part: Callable[[Tensor], Tensor], x_RnD: Tensor) -> Tensor:
    """Return the output of a part of a layer, with the convolutions around it if it has any."""
    if convolution is None:
        return part(x_RnD)
    x_RnD, weights_RnKD = convolution.before(x_RnD)
    return convolution.after(part(x_RnD), weights_RnKD)


class MarkovHead(nn.Module):
    """Logits that are added for the token before: a matrix of low rank, from the target's vocabulary to the draft's
    (DSpark, section 3.1)."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab: int) -> None:
        super().__init__()
        self.before = nn.Embedding(vocab_size, rank)
        self.after = nn.Linear(rank, draft_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the addition to the logits [..., V], for the ids [...] of the preceding tokens."""
        return self.after(self.before(tokens))  # type: ignore[no-any-return]


class Selector(nn.Module):
    """Scores the tokens of the highest logits anew, by the token before and the slot's hidden (DFlash 2); other tokens
    are not drafted."""

    def __init__(self, size: int, vocab_size: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.before, self.after = (nn.Embedding(vocab_size, rank) for _ in range(2))
        self.hidden = nn.Linear(size, rank, bias=False)
        self.candidates = candidates

    def forward(self, logits_B1V: Tensor, hidden_B1D: Tensor, tokens_BQ: Tensor) -> Tensor:
        """Return the logits [B, Q, V] after these tokens."""
        best_B1K, index_B1K = logits_B1V.topk(min(self.candidates, logits_B1V.shape[-1]))
        context_BQr = self.before(tokens_BQ) * self.hidden(hidden_B1D)
        added_BQK = context_BQr @ self.after(index_B1K[:, 0]).transpose(1, 2)
        logits_BQV = torch.full_like(logits_B1V, -math.inf).expand(-1, tokens_BQ.shape[1], -1)
        return logits_BQV.scatter(2, index_B1K.expand_as(added_BQK), best_B1K + added_BQK.to(best_B1K.dtype))


class BlockNet(nn.Module):
    """fc and hidden_norm over the features, layers over context and block, norm; with further parts
    as `extras` says."""

    def __init__(self, shape: LayerShape, layers: int, features: int, vocab_size: int, extras: Extras) -> None:
        """features: F, the width of the features of all fused layers of the target."""
        super().__init__()
        D = shape.hidden_size
        self.fc = nn.Linear(features, D, bias=False)
        self.hidden_norm = RMSNorm(D, shape.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(shape, extras.taps, extras.group) for _ in range(layers))
        self.norm = RMSNorm(D, shape.rms_eps)
        draft_vocab, rank = extras.draft_vocab or vocab_size, extras.markov_rank
        self.head = nn.Linear(D, draft_vocab, bias=False) if extras.own_head else None
        self.markov = MarkovHead(vocab_size, rank, draft_vocab) if rank else None
        selects = bool(extras.selector_rank)
        self.selector = Selector(D, vocab_size, extras.selector_rank, extras.candidates) if selects else None
        wide = D + (extras.markov_rank if extras.confidence == "hidden+markov" else 0)
        self.confidence = nn.Linear(wide, 1) if extras.confidence != "none" else None
        self.extras = extras

    @property
    def typed_layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def context(self, features: Tensor) -> Tensor:
        """Return the input of all layers' keys and values, [..., D], for the target's features [..., F]."""
        return self.hidden_norm(self.fc(features))  # type: ignore[no-any-return]

    def store_kv(self, context_RTD: Tensor, position_RT: Tensor, stores: Sequence[LayerCache]) -> None:
        """Store the keys and values of committed tokens in every layer."""
        for layer, store in zip(self.typed_layers, stores, strict=True):
            k_RTKh, v_RTKh = layer.attention.rotated_key_value(context_RTD, position_RT)
            store.update(k_RTKh.transpose(1, 2), v_RTKh.transpose(1, 2))

    def forward(
        self, hidden_RnD: Tensor, position_Rn: Tensor, stores: Sequence[LayerCache], masks_R1nW: Sequence[Tensor]
    ) -> Tensor:
        """Return the normed hidden [R, n, D] of the slots, from the embeddings of the blocks and each layer's mask."""
        for layer, store, mask_R1nW in zip(self.typed_layers, stores, masks_R1nW, strict=True):
            attend = partial(layer.attention.attend_cached, position_Rn=position_Rn, store=store, mask_R1nW=mask_R1nW)
            hidden_RnD = layer(hidden_RnD, attend)
        return self.norm(hidden_RnD)  # type: ignore[no-any-return]

    def accepted(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logit [...] of the expected rate of acceptance, from the hidden of a slot and the token before
        the one that it predicts."""
        assert self.confidence is not None
        if self.extras.confidence == "hidden+markov":
            assert self.markov is not None
            hidden = torch.cat([hidden, self.markov.before(before).to(hidden.dtype)], dim=-1)
        return self.confidence(hidden)[..., 0]  # type: ignore[no-any-return]
