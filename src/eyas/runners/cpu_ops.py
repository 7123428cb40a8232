"""The operations of a cycle by the compiled kernels of a CPU: the same numbers as `core.ops.Ops`,
which is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from eyas import kernels
from eyas.core.ops import Ops
from eyas.core.sampling import GumbelNoise, Sampling
from eyas.core.target import Target
from eyas.core.tree import Draft, Tree, Verdict
from eyas.drafters.tools import FusedTreeBuilder
from eyas.runners._cpu_net import with_cpu_kernels
from eyas.runners.cpu_grow import tree_builder_of

__all__ = ["CpuCycleOps", "CpuNoise", "CpuOps"]


class CpuNoise(GumbelNoise):
    """Gumbel noise by kernels."""

    def gumbel(self, position_BN: Tensor, vocab: int | Tensor, stream: int = GumbelNoise.TARGET) -> Tensor:
        return kernels.gumbel(self.seed_B, self.greedy_B, stream, position_BN, vocab)


class CpuCycleOps(Ops):
    """Draws, paths and commits by kernels, with any runner of the model's forward."""

    def noise(self, sampling: Sequence[Sampling | None], device: torch.device | str = "cpu") -> GumbelNoise:
        return CpuNoise.from_sampling(sampling, device)

    def draw(
        self, scores_BNV: Tensor, tree: Tree, position_B: Tensor, noise: GumbelNoise
    ) -> tuple[Tensor, Tensor | None]:
        return kernels.draw(
            scores_BNV, tree.depth_BN, tree.acceptable_BN, position_B, noise.seed_B, noise.greedy_B, noise.TARGET
        )

    def accept_path(self, draft: Draft, draw_BN: Tensor) -> Verdict:
        tree = draft.tree
        return Verdict(
            *kernels.follow(draft.tokens_BN, tree.parents_BN, tree.acceptable_BN, draw_BN, tree.max_depth + 1)
        )

    def commit(self, store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
        kernels.commit(store, length_B, path_BP)


class CpuOps(CpuCycleOps):
    """The operations of `CpuCycleOps`, and draft nets by kernels: for targets that run by kernels
    themselves.

    Args:
        threads: number of threads of draft nets; a function is called for each forward.
        lm_head: the target's lm_head.
        packed: the same, packed for the kernels.
    """

    draft_formats = ("auto", "int4")  # "auto" is int8 here (`kernels.draft_format`)

    def __init__(self, threads: kernels.ThreadCount, lm_head: nn.Linear, packed: kernels.Matrix) -> None:
        self.threads, self.lm_head, self.packed = threads, lm_head, packed

    @cached_property
    def draft_lm_head(self) -> kernels.Matrix:
        """The target's lm_head as draft nets without one of their own read it: rounded like their other weights.
        A draft reads it once for each level, and in float32 that is most of a draft's time."""
        if self.packed.kind not in ("float32", "bfloat16"):
            return self.packed
        rows = getattr(self.lm_head, "stored_rows", None)  # of a weight that stays in its file
        return kernels.pack(
            self.lm_head.weight if rows is None else rows, self.lm_head.bias, kernels.draft_format("exact")
        )

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        return with_cpu_kernels(net, kernels.draft_format(draft_weights), self.threads)

    def fused_tree_builder(
        self, target: Target, net: nn.Module, embeddings: Tensor | None, draft_ids_v: Tensor | None
    ) -> FusedTreeBuilder | None:
        return tree_builder_of(target, net, embeddings, draft_ids_v, lambda: self.draft_lm_head)
