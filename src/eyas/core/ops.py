"""The operations of a cycle that a runner may replace by faster ones: here the reference, in torch.

Each runner has its operations (`Runner.ops`): runners/cpu_ops.py has the CPU kernels', and the distribution
eyas-gpu has the GPU kernels'. Every implementation must return the results of this
one: the same draws, paths and caches.

Letters: B rows, N nodes, P nodes on the longest path, V vocabulary, v draft vocabulary, D hidden, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.core.adjustments import Adjustments
from eyas.core.cache import commit_path
from eyas.core.sampling import GumbelNoise, Sampling, apply_sampling_rows
from eyas.core.verify import Rule

__all__ = ["REFERENCE", "Backend", "Ops"]


Backend = str | Callable[..., Any]
"""A backend of torch.compile."""


class Ops(Rule):
    """The reference implementation of every operation, in torch; the rule of verification is in verify.py.

    Attributes:
        draft_formats: weight formats that `draft_net` supports.
    """

    draft_formats: tuple[str, ...] = ("auto",)

    def noise(self, sampling: Sequence[Sampling | None], device: torch.device | str = "cpu") -> GumbelNoise:
        """Return the random numbers of rows with these samplings; None is an empty row."""
        return GumbelNoise.from_sampling(sampling, device)

    def scores(self, logits_BNV: Tensor, sampling: Sequence[Sampling], adjustments: Adjustments | None) -> Tensor:
        """See `core.sampling.apply_sampling_rows`. Logits that nothing changes may keep their dtype."""
        return apply_sampling_rows(logits_BNV, sampling, adjustments)

    def commit(self, store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
        """See `core.cache.commit_path`."""
        commit_path(store, length_B, path_BP)

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        """Return a draft net for decoding.

        Args:
            draft_weights: one of `draft_formats`. "auto": as the net is; CPU kernels round it then
                too, to int8 weights and 16-bit activations.
        """
        return net

    def fused_tree_builder(
        self, target: Any, net: nn.Module, embeddings: Tensor | None, draft_ids_v: Tensor | None
    ) -> Any:
        """Return a function that grows dynamic trees of this net in one call, a
        `drafters._grow.FusedTreeBuilder`; None if they are grown level by level.

        Args:
            target: the `Target` that the net drafts for.
            net: an EAGLE net as `draft_net` returned it.
            embeddings: [V, D], the net's own embedding table; None: the target's.
            draft_ids_v: int64; the target's ids of a draft vocabulary that is smaller than the
                target's.
        """
        return None


REFERENCE = Ops()
