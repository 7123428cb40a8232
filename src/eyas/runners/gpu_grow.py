"""Grows the dynamic tree of an EAGLE net by GPU kernels, about eighteen a level: the tree of
`drafters._grow.grow_dynamic`.

It supports rows that differ in their seeds only, without penalties and biases. In other cases
`grow_dynamic` grows the tree. Of children whose keys are equal it takes the one with the smaller
index.

Letters: B rows, P pending pairs, Q nodes of a level, K children of each, X all drafted nodes and
the root, M kept nodes, D hidden, v draft vocabulary, T nodes in slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas import gpu
from eyas.core.drafter import CycleInput
from eyas.core.sampling import equal_but_for_seeds
from eyas.core.tree import Draft, FullDraft, Tree
from eyas.drafters.tools import DynamicTree

if TYPE_CHECKING:
    from eyas.core.target import Target
    from eyas.nn import DraftKVCache

__all__ = ["GpuTreeBuilder", "tree_builder_of"]


def tree_builder_of(target: Target, net: Any, own_table: Tensor | None, ids_v: Tensor | None) -> GpuTreeBuilder | None:
    """Return the tree builder of an EAGLE net whose layer runs by kernels; None for other nets.

    Args:
        own_table: [V, D] embeddings, if they are not the target's.
        ids_v: int64; the target's ids of the draft vocabulary, if it is smaller than the target's.
    """
    layer = getattr(net, "layer", None)
    if getattr(layer, "fused", None) is None:
        return None
    own_head = getattr(net, "head", None)
    if hasattr(layer, "embed_norm"):  # EAGLE-3's

        def head(hidden: Tensor) -> Tensor:
            normed = net.head_input(hidden)
            return own_head(normed) if own_head is not None else target.head(normed.to(target.dtype))

    elif getattr(net, "inputs", "") == "shifted":  # EAGLE-1's

        def head(hidden: Tensor) -> Tensor:
            return target.head(hidden.to(target.dtype))

    else:
        return None
    dtype = net.fc.weight.dtype

    def embed(ids: Tensor) -> Tensor:
        return (target.embed(ids) if own_table is None else own_table[ids]).to(dtype)

    vocabulary = own_head.weight.shape[0] if own_head is not None else target.vocab_size
    return GpuTreeBuilder(net, embed, head, ids_v, vocabulary)


@dataclass(frozen=True)
class _Level:
    """The nodes of a level, which the net reads next."""

    token_BQ: Tensor
    hidden_BQD: Tensor  # the net's output at their parents
    value_BQ: Tensor
    number_BQ: Tensor  # among the drafted nodes
    visible_BQT: Tensor


class GpuTreeBuilder:
    """Grows the dynamic trees of one net: a `drafters._grow.FusedTreeBuilder` and `WindowTreeBuilder`."""

    fuses_features = False

    def __init__(
        self,
        net: Any,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        ids_v: Tensor | None,
        vocabulary: int,
    ) -> None:
        self.net, self.embed, self.head, self.ids_v, self.vocabulary = net, embed, head, ids_v, vocabulary

    @staticmethod
    def suits(cycle_input: CycleInput) -> bool:
        """Return whether all rows share a Sampling, and their scores do not depend on the text."""
        return equal_but_for_seeds(cycle_input.sampling) and cycle_input.adjustments is None

    def __call__(
        self, features_BPF: Tensor, tokens_BP: Tensor, count_B: Tensor, cycle_input: CycleInput, tree: DynamicTree, cache: DraftKVCache,
        length_B: Tensor, width: int,
    ) -> Draft:  # fmt: skip
        """See `drafters._grow.FusedTreeBuilder`. The pending pairs' features are fused already."""
        hidden_BD = self._forward_pending(features_BPF, tokens_BP, count_B, cycle_input, cache, length_B, width)
        return self.grow(hidden_BD, cycle_input, tree, cache, length_B + count_B, width)

    def grow(
        self,
        hidden_BD: Tensor,
        cycle_input: CycleInput,
        tree: DynamicTree,
        cache: DraftKVCache,
        length_B: Tensor,
        width: int,
    ) -> Draft:
        """See `drafters._grow.WindowTreeBuilder`."""
        B, K = len(length_B), min(tree.branch, self.vocabulary)
        X = 1 + K + (tree.depth - 1) * K * K
        drafted = self._empty(B, X, length_B)
        nodes, numbers = self._root(hidden_BD, cycle_input), list[Tensor]()
        for level in range(tree.depth):
            hidden_BQD = nodes.hidden_BQD
            if level:
                hidden_BQD = self._expand(nodes, cache, length_B, level, width)
            first = 1 if not level else 1 + K + (level - 1) * K * K
            nodes = self._step(nodes, hidden_BQD, drafted, cycle_input, tree, level, first, K)
            numbers.append(nodes.number_BQ)
        return self._tree(drafted, numbers, cycle_input, tree)

    def _forward_pending(
        self,
        fused_BPD: Tensor,
        tokens_BP: Tensor,
        count_B: Tensor,
        cycle_input: CycleInput,
        cache: DraftKVCache,
        length_B: Tensor,
        width: int,
    ) -> Tensor:
        """Read the pending pairs; returns the net's output [B, D] at the newest one."""
        B, P = tokens_BP.shape
        last_B1 = (count_B - 1).clamp(min=0)[:, None]
        next_BP = tokens_BP.roll(-1, dims=1).scatter(1, last_B1, cycle_input.tokens_B[:, None])
        order_P = torch.arange(P, device=tokens_BP.device)
        causal_BPP = (order_P[:, None] >= order_P).expand(B, P, P)
        hidden_BPD = self._read(next_BP, fused_BPD, length_B[:, None] + order_P, causal_BPP, cache, length_B, width)
        return hidden_BPD.gather(1, last_B1[..., None].expand(-1, -1, hidden_BPD.shape[-1]))[:, 0]

    def _expand(self, nodes: _Level, cache: DraftKVCache, length_B: Tensor, level: int, width: int) -> Tensor:
        position_BQ = (length_B[:, None] + (level - 1)).expand_as(nodes.token_BQ)
        return self._read(nodes.token_BQ, nodes.hidden_BQD, position_BQ, nodes.visible_BQT, cache, length_B, width)

    def _read(
        self,
        tokens_BQ: Tensor,
        hidden_BQD: Tensor,
        position_BQ: Tensor,
        visible_BQT: Tensor,
        cache: DraftKVCache,
        length_B: Tensor,
        width: int,
    ) -> Tensor:
        """Run the net once; its kernels store keys and values in the slots of the last Q of the T nodes."""
        Q, T = visible_BQT.shape[1:]
        cache.prepare(
            range(len(length_B)), lambda: length_B[:, None] + torch.arange(T - Q, T, device=length_B.device), width
        )
        cache.set_mask(length_B, visible_BQT)
        return self.net(hidden_BQD, self.embed(tokens_BQ), position_BQ, cache)  # type: ignore[no-any-return]

    def _root(self, hidden_BD: Tensor, cycle_input: CycleInput) -> _Level:
        """Return the root: of these tensors only `hidden_BQD` is read."""
        root_B1 = cycle_input.tokens_B[:, None]
        value_B1 = hidden_BD.new_empty(root_B1.shape, dtype=torch.float32)
        return _Level(
            root_B1, hidden_BD[:, None], value_B1, root_B1, hidden_BD.new_empty((*root_B1.shape, 0), dtype=torch.bool)
        )

    @staticmethod
    def _empty(B: int, X: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return empty tensors for tokens, log q, values and parents of the drafted nodes."""
        floats = [like.new_empty(B, X, dtype=torch.float32) for _ in range(2)]
        return like.new_empty(B, X), floats[0], floats[1], like.new_empty(B, X)

    def _step(
        self, nodes: _Level, hidden_BQD: Tensor, drafted: tuple[Tensor, Tensor, Tensor, Tensor], cycle_input: CycleInput,
        tree: DynamicTree, level: int, first: int, K: int,
    ) -> _Level:  # fmt: skip
        """Draft the children of a level's nodes; returns the next level's nodes."""
        noise, sampling, coupled = cycle_input.noise, cycle_input.sampling[0], tree.noise == "coupled"
        logits_BQv, temperature = (
            self.head(hidden_BQD),
            sampling.temperature if coupled and not sampling.greedy else 1.0,
        )
        if coupled and not sampling.greedy and sampling.has_filters:
            logits_BQv = gpu.filtered(logits_BQv, temperature, sampling.top_k, sampling.top_p, sampling.min_p)
            temperature = 1.0
        children = gpu.best_children(
            logits_BQv, self.ids_v, noise.seed_B, noise.greedy_B, cycle_input.position_B, level, temperature,
            tree.confidence_temperature, coupled and not noise.all_greedy, coupled, K,
        )  # fmt: skip
        token_BK, value_BK, number_BK, parent_BK, visible_BKT = gpu.grow_step(
            *children, self.ids_v, nodes.value_BQ, nodes.number_BQ, nodes.visible_BQT, *drafted, cycle_input.tokens_B,
            first, tree.log_stop, tree.expand == "value",
        )  # fmt: skip
        hidden_BKD = hidden_BQD.gather(1, parent_BK[..., None].expand(-1, -1, hidden_BQD.shape[-1]))
        return _Level(token_BK, hidden_BKD, value_BK, number_BK, visible_BKT)

    def _tree(
        self,
        drafted: tuple[Tensor, Tensor, Tensor, Tensor],
        numbers: list[Tensor],
        cycle_input: CycleInput,
        tree: DynamicTree,
    ) -> Draft:
        """Return the tree of the best drafted nodes, or of the expanded ones."""
        value_BX, parents_BX = drafted[2:]
        if tree.rerank:
            selected_BM = gpu.keep_best(value_BX, min(tree.nodes, value_BX.shape[1]) - 1)
        else:
            selected_BM = torch.cat(numbers, dim=1)[:, : tree.nodes - 1].sort(dim=-1).values
        tokens_BN, log_q_BN, value_BN, parents_BN, acceptable_BN, depth_BN, mask_BNN = gpu.build_tree(
            selected_BM, *drafted, tree.depth
        )
        full = FullDraft(parents_BX, value_BX) if tree.rerank else None
        made = Tree(parents_BN, acceptable_BN, depth_BN, mask_BNN, tree.depth)
        return Draft(made, tokens_BN, log_q_BN, value_BN=value_BN, drafted=full)
