"""The session of block drafters: one pass of the net over [root, mask, mask, ...] in every cycle.

    prefill   the net stores keys and values of the prompt's features
    draft     the same for the tokens accepted in the last cycle ("pending"); then one pass over the block. The slots give the
              distributions of the levels, and the tree grows from them without a further pass
    commit    the features of the accepted path become pending; keys and values of the block are overwritten by the next ones

Letters: B rows, R rows of a forward, P nodes on the longest path, n slots of a block, T tokens, D
hidden, F features, W slots of the cache.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from eyas.blocks._net import BlockFormat, BlockNet
from eyas.core.cache import KVCache, slot_mask
from eyas.core.drafter import Capturable, CycleInput, DraftSession
from eyas.core.target import Target
from eyas.core.tree import Draft, TargetOutput, Verdict
from eyas.drafters.tools import MARGIN, DynamicTree
from eyas.nn import LayerShape

__all__ = ["BlockSession"]


class DraftingMethod(Protocol):
    """The parts of a method that its session uses."""

    target: Target
    shape: LayerShape
    block_format: BlockFormat
    tree: DynamicTree
    net: BlockNet
    feature_layers: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def decoding_net(self) -> Any: ...

    def embed(self, ids: Tensor) -> Tensor: ...

    def grow(self, hidden_BSD: Tensor, cycle_input: CycleInput) -> Draft: ...


class BlockSession(DraftSession):
    """The draft's keys and values of B rows, and the features of the tokens accepted last, which it
    has not read yet.

    Slot t of a row holds token t. `length_B` + `pending_B` is the root's position.
    """

    def __init__(self, drafter: DraftingMethod, rows: int) -> None:
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
        """Store the pending tokens. They are padded to the longest path, so that shapes do not
        depend on values."""
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
