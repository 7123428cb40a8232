"""Nets that are trained on their own outputs: the predictions that count, and the steps of the training-time
test (EAGLE-3, section 3.2). They serve EAGLE-3's nets, P-EAGLE's masks and MTP modules.

Step i (0, 1, ...) at slot t predicts token t+2+i, and counts when that token counts. This module knows no loss.

Letters: N packed tokens, F features, I steps, M slots, K predictions of all steps, U target positions (tokens that
count), D hidden, W keys; T tokens of a document, m of them that count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from eyas.core.target import Target
from eyas.drafters import Batch, eagle3, mtp, peagle
from eyas.nn import DecoderLayer, Documents, KeysValues
from eyas_train.losses import DraftLosses
from eyas_train.packed import QueryRows, attend_packed


@dataclass(frozen=True)
class Predictions:
    """The predictions that count: prediction k is made at step `step_K[k]`, at slot
    `rows_M[row_K[k]]`, of the token at target position `position_K[k]`."""

    rows_M: Tensor  # int64, ascending: slots from which something is predicted that counts
    step_K: Tensor
    row_K: Tensor
    position_K: Tensor
    # index of the token before each target position: its final feature gives the target's
    # distribution
    before_U: Tensor

    @classmethod
    def from_batch(cls, batch: Batch, steps: int) -> Predictions:
        """Return all predictions of a training-time test of `steps` steps in a batch."""
        counted_N, device = batch.counted_N, batch.counted_N.device
        goal_NI = torch.arange(len(counted_N), device=device)[:, None] + 2 + torch.arange(steps, device=device)
        inside_NI = goal_NI < batch.documents.end_N(device)[:, None]
        counts_NI = counted_N[goal_NI.clamp(max=len(counted_N) - 1)] & inside_NI
        rows_M = counts_NI.any(1).nonzero()[:, 0]
        step_K, row_K = counts_NI[rows_M].T.nonzero(as_tuple=True)
        position_N = counted_N.cumsum(0) - 1  # the target position of a token that counts
        before_U = (counted_N.nonzero()[:, 0] - 1).clamp(min=0)
        return cls(rows_M, step_K, row_K, position_N[goal_NI[rows_M[row_K], step_K]], before_U)

    def target_logits(self, features_NF: Tensor, target: Target) -> Callable[[slice], Tensor]:
        """Return the function from a slice of the target positions to the target's logits there. The
        target's final features are the last ones of `features_NF`."""
        final_ND = features_NF[:, -target.hidden_size :]
        return lambda positions: target.head(final_ND[self.before_U[positions]].to(target.dtype))

    def figures(self, losses: DraftLosses, steps: int) -> dict[str, Tensor]:
        """Return how often the first and the last step are right, and their overlap, summed."""
        sums = {}
        for step in dict.fromkeys((0, steps - 1)):
            suffix, is_here_K = f" at step {step + 1}" if step else "", self.step_K == step
            sums["accuracy" + suffix] = losses.is_correct_K[is_here_K].sum()
            sums["overlap" + suffix] = losses.overlap_K[is_here_K].sum()
        return sums


def training_time_test(
    net: eagle3.Net, features_NF: Tensor, embed: Callable[[Tensor], Tensor], rows_M: Tensor, documents: Documents,
    steps: int, gradient_checkpointing: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the hidden [M, D] at the slots `rows_M` after each step of the training-time test.

    Args:
        embed: index of a packed token [M] -> its embedding [M, D].
        rows_M: int64, ascending; the other slots give keys and values only.
        gradient_checkpointing: keep only inputs, keys and values of a step; recompute the rest
            in the backward pass.
    """
    N, device = len(features_NF), features_NF.device
    passes = PackedPasses(net, rows_M, documents, device, gradient_checkpointing)
    hidden_MD = passes.first(
        *net.join(net.fuse(features_NF), embed((torch.arange(N, device=device) + 1).clamp(max=N - 1)))
    )
    hidden = [net.next_input(hidden_MD)]  # after steps 0, 1, ...
    for i in range(1, steps):
        x_MD, residual_MD = net.join(hidden[-1], embed((rows_M + 1 + i).clamp(max=N - 1)))
        hidden.append(net.next_input(passes.next(x_MD, residual_MD)))
    return hidden


def in_parallel(
    net: peagle.ParallelNet, features_NF: Tensor, embed: Callable[[Tensor], Tensor], mask_D: Tensor, rows_M: Tensor,
    documents: Documents, steps: int, gradient_checkpointing: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the hidden [M, D] at the slots `rows_M`, and at each of the masks after them."""
    N, device = len(features_NF), features_NF.device
    passes = PackedPasses(net, rows_M, documents, device, gradient_checkpointing)
    following_ND = embed((torch.arange(N, device=device) + 1).clamp(max=N - 1))
    hidden = [net.next_input(passes.first(*net.join(net.fuse(features_NF), following_ND)))]
    mask_1D = net.fuse(net.mask_hidden[None])
    x_1D, residual_1D = net.join(mask_1D, mask_D[None])
    x_MD, residual_MD = (one.expand(len(rows_M), -1) for one in (x_1D, residual_1D))
    return hidden + [net.next_input(passes.next(x_MD, residual_MD)) for _ in range(1, steps)]


class PackedPasses:
    """Passes of a net over packed documents, for training: the first over all slots, the next ones
    over the query rows M.

    In pass i (0, 1, ...) the position of a row is its slot's position plus i. It attends to the first pass's keys
    up to its slot, and to the keys of passes 1..i at its own slot.
    """

    def __init__(
        self, net: eagle3.Net, rows_M: Tensor, documents: Documents, device: torch.device, gradient_checkpointing: bool
    ) -> None:
        self.layers: list[DecoderLayer] = [net.layer, *net.later_layers]
        self.norms = [layer.input_norm for layer in net.later_layers]
        self.rows_M, self.documents, self.gradient_checkpointing = rows_M, documents, gradient_checkpointing
        self.position_N = documents.position_N(device)
        self.queries = QueryRows(rows_M, documents.lengths)
        self.keys = list[KeysValues]()  # keys and values of the first pass, by layer
        self.later: list[list[KeysValues]] = [[] for _ in self.layers]  # keys and values of later passes, by layer

    def first(self, x_ND: Tensor, residual_ND: Tensor) -> Tensor:
        """Return the hidden [M, D] at the query rows. Layers before the last are computed at all slots, as
        the next one makes keys of them."""
        for number, layer in enumerate(self.layers[:-1]):
            self.keys.append(layer.attention.rotated_key_value(x_ND, self.position_N))
            every = QueryRows(torch.arange(len(x_ND), device=x_ND.device), self.documents.lengths)
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
            return layer.finish(residual_MD, attend_packed(layer.attention, x_MD, position_M, queries, keys, later))

        if self.gradient_checkpointing:
            recomputed: Tensor = checkpoint(compute, x_MD, residual_MD, use_reentrant=False)
            return recomputed
        return compute(x_MD, residual_MD)


def module_steps(
    net: mtp.Net,
    features_ND: Tensor,
    embed: Callable[[Tensor], Tensor],
    rows_M: Tensor,
    documents: Documents,
    steps: int,
) -> list[Tensor]:
    """Return the output [M, D] at the slots `rows_M` after each step of the training-time test
    (EAGLE-3, section 3.2).

    Step 0 reads the target's features; step i reads the output of step i - 1 at its slot. It attends to the
    pairs of step 0 up to the slot, and to the pairs of steps 1 to i at the slot.

    Args:
        embed: index of a packed token [m] -> its embedding [m, D].
        rows_M: int64, ascending.
    """
    by_document = list[list[Tensor]]()
    for length, end in zip(documents.lengths, accumulate(documents.lengths), strict=True):
        rows_m = rows_M[(rows_M >= end - length) & (rows_M < end)]
        if len(rows_m):
            by_document.append(_document_steps(net, features_ND, embed, rows_m, end - length, steps))
    if not by_document:
        projection: Any = net.module.eh_proj
        # so that a batch without such slots has a gradient
        return [features_ND[:0] * projection.weight.sum()] * steps
    return [torch.cat(outputs) for outputs in zip(*by_document, strict=True)]


def _document_steps(
    net: mtp.Net, features_ND: Tensor, embed: Callable[[Tensor], Tensor], rows_m: Tensor, begin: int, steps: int
) -> list[Tensor]:
    """Return the outputs [m, D] of `module_steps` for the document that begins at a packed token."""
    end, last = int(rows_m[-1]) + 1, len(features_ND) - 1
    index_T, cache = torch.arange(begin, end, device=rows_m.device), DynamicCache()
    position_m = rows_m - begin
    key_position_W = index_T - begin
    hidden_1ND, following_N, position_N = features_ND[None, begin:end], index_T + 1, key_position_W
    allowed_NW = key_position_W <= key_position_W[:, None]
    outputs = list[Tensor]()
    for step in range(steps):
        mask = net.mask(allowed_NW[None, None], key_position_W, position_N[None], hidden_1ND.dtype)
        embeddings_1ND = embed(following_N.clamp(max=last))[None]
        output_1ND = net.run(hidden_1ND, embeddings_1ND, position_N[None], cache, mask)
        outputs.append(output_1ND[0] if step else output_1ND[0, position_m])
        hidden_1ND, following_N, position_N = outputs[-1][None], rows_m + 2 + step, position_m + 1 + step
        own_mm = torch.eye(len(rows_m), dtype=torch.bool, device=rows_m.device)
        allowed_NW = torch.cat([allowed_NW if step else allowed_NW[position_m], own_mm], dim=1)
        key_position_W = torch.cat([key_position_W, position_N])
    return outputs
