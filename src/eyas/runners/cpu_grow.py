"""Grows the dynamic tree of an EAGLE net, all levels, in one call of the compiled kernels: the same
tree as `drafters._grow.grow_dynamic`.

It supports rows that are greedy or sample by a temperature alone, and drafts without a window. In
other cases `grow_dynamic` grows the tree level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas import kernels
from eyas.core.drafter import CycleInput
from eyas.core.sampling import Sampling
from eyas.core.tree import Draft, FullDraft, Tree
from eyas.drafters.tools import DynamicTree
from eyas.runners._cpu_net import CpuLayer, KernelLinear

if TYPE_CHECKING:
    from eyas.core.target import Target
    from eyas.nn import DraftKVCache

__all__ = ["CpuTreeBuilder", "tree_builder_of"]


def tree_builder_of(
    target: Target,
    net: Any,
    own_table: Tensor | None,
    ids_v: Tensor | None,
    lm_head: Callable[[], kernels.Matrix],
) -> CpuTreeBuilder | None:
    """Return the tree builder of an EAGLE net that runs by kernels; None if the kernels cannot grow trees
    with it.

    Args:
        own_table: [V, D] embeddings, if they are not the target's.
        ids_v: int64; the target's ids of the draft vocabulary, if it is smaller than the target's.
        lm_head: returns the target's, packed; called if the net has none of its own.
    """
    every = [getattr(net, "layer", None), *getattr(net, "later_layers", ())]
    fused = getattr(every[0], "fused", None)
    if fused is None:
        return None
    table = getattr(target.family.embedding, "weight", None) if own_table is None else own_table
    unscaled, D = target.family.embed_scale == 1.0 or own_table is not None, fused.shape.hidden
    if table is None or not unscaled or table.dtype != torch.float32 or table.shape[1] != D:
        return None
    packed = _packed_net(net, table.detach(), ids_v, lm_head)
    if packed is None or packed.head.inputs != D:
        return None
    later = [replace(layer.fused.layer.layers[0], norm=layer.input_norm.weight.detach()) for layer in every[1:]]
    layers = kernels.Layers(fused.shape, [*fused.layer.layers, *later], fused.layer.threads) if later else fused.layer
    return CpuTreeBuilder(fused, layers, packed)


def _packed_net(
    net: Any, table: Tensor, ids_v: Tensor | None, lm_head: Callable[[], kernels.Matrix]
) -> kernels.Net | None:
    """Return the weights of the net as the kernels read them; None for other nets than EAGLE-1's,
    EAGLE-3's and MTP modules."""
    if hasattr(net, "input_norm") and hasattr(net, "embed_norm"):  # an MTP module with a LLaMA layer
        return kernels.Net(
            lm_head(),
            table,
            fc=net.fc.matrix,
            embed_norm_D=net.embed_norm.weight.detach(),
            hidden_norm_D=net.hidden_norm.weight.detach(),
            input_norm_D=net.input_norm.weight.detach(),
            norm_D=net.norm.weight.detach(),
            norm_output=True,
        )
    if isinstance(getattr(net, "fc", None), KernelLinear) and getattr(net, "inputs", "") == "shifted":  # EAGLE-1's
        return kernels.Net(lm_head(), table, fc=net.fc.matrix)
    if hasattr(net.layer, "embed_norm"):  # EAGLE-3's
        return kernels.Net(
            lm_head() if net.head is None else net.head.matrix,
            table,
            fuse=_fusing_matrix(net),
            embed_norm_D=net.layer.embed_norm.weight.detach(),
            hidden_norm_D=net.layer.hidden_norm.weight.detach(),
            norm_D=net.norm.weight.detach(),
            ids_v=ids_v,
            residual_normed=net.architecture.norm_before_residual,
            norm_output=net.architecture.norm_output,
        )
    return None


def _fusing_matrix(net: Any) -> kernels.Matrix | None:
    """Return the matrix that fuses features (fc); None if norms are part of the fusion."""
    fc_only = isinstance(net.fc, KernelLinear) and net.fc_norm is None and net.input_norm is None
    return net.fc.matrix if fc_only and not net.fc.matrix.inputs % 16 else None


@lru_cache(maxsize=64)
def _temperatures(sampling: tuple[Sampling, ...]) -> Tensor:
    return torch.tensor([0.0 if s.greedy else s.temperature for s in sampling], dtype=torch.float32, device="cpu")


@cache
def _one_node_mask(rows: int) -> Tensor:
    """Return the tree mask of one node in each row."""
    return torch.ones(rows, 1, 1, dtype=torch.bool, device="cpu")


class CpuTreeBuilder:
    """Grows the dynamic trees of one net: a `drafters._grow.FusedTreeBuilder`."""

    def __init__(self, layer: CpuLayer, layers: kernels.Layers, net: kernels.Net) -> None:
        self.layer, self.layers, self.net = layer, layers, net

    @staticmethod
    def suits(cycle_input: CycleInput) -> bool:
        """Return whether the kernels can grow this cycle's trees: no filters, no other changes of the scores."""
        return cycle_input.adjustments is None and not any(sampling.has_filters for sampling in cycle_input.sampling)

    @property
    def fuses_features(self) -> bool:
        """Whether the net joins the features of several layers."""
        return self.net.fuse is not None

    def __call__(
        self, features_BPF: Tensor, tokens_BP: Tensor, count_B: Tensor, cycle_input: CycleInput, tree: DynamicTree, cache: DraftKVCache,
        length_B: Tensor, width: int,
    ) -> Draft:  # fmt: skip
        """See `drafters._grow.FusedTreeBuilder`."""
        rows: Sequence[int] = cycle_input.active_rows or range(len(length_B))
        row_R = None if len(rows) == len(length_B) else torch.tensor(rows, device="cpu")

        def active(x_BX: Tensor) -> Tensor:
            """Return the tensor without empty rows."""
            return x_BX if row_R is None else x_BX[row_R]

        pending = kernels.Pending(active(features_BPF).contiguous(), active(tokens_BP), active(count_B))
        noise_RLv = None
        if tree.noise == "coupled" and not cycle_input.noise.all_greedy:
            vocab = self.net.head.outputs if self.net.ids_v is None else self.net.ids_v
            depth_L = torch.arange(1, tree.depth + 1, device="cpu")
            noise_RLv = active(cycle_input.noise.gumbel(cycle_input.position_B[:, None] + depth_L, vocab))
        tree_options = kernels.TreeOptions(
            depth=tree.depth,
            branch=tree.branch,
            nodes=tree.nodes,
            by_confidence=tree.expand == "confidence",
            rerank=tree.rerank,
            log_stop=tree.log_stop,
            inverse_temperature=1 / tree.confidence_temperature,
            temperature_R=active(_temperatures(cycle_input.sampling)),
            noise_RLv=noise_RLv,
        )
        length_R = active(length_B)
        position_R1 = length_R[:, None]
        cache.prepare(rows, lambda: position_R1, width)
        cache.set_mask(length_R, _one_node_mask(len(rows)))
        contents = cache.cpu_kernel_view(layers=len(self.layers.layers))
        assert contents is not None, "the kernels do not support a window"
        attention_pass = self.layer.attention_pass(contents, position_R1, width)
        grown = kernels.grow(self.net, self.layers, tree_options, attention_pass, pending, active(cycle_input.tokens_B))
        grown = grown if row_R is None else grown.spread(row_R, cycle_input.tokens_B)
        drafted_tree = Tree(grown.parents_BN, grown.acceptable_BN, grown.depth_BN, grown.mask_BNN, tree.depth)
        drafted = FullDraft(grown.drafted_parents_BX, grown.drafted_value_BX) if tree.rerank else None
        return Draft(drafted_tree, grown.tokens_BN, grown.log_q_BN, value_BN=grown.value_BN, drafted=drafted)
