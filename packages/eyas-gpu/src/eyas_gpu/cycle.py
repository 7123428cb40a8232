"""The operations of a cycle by the GPU kernels: the results of `core.ops.Ops`, which is the reference.

Draws: the reference adds score and noise in float32 after a log softmax, the kernel adds the same
float32 noise to the score in float64. So the ids are equal unless two tokens are closer than the
reference rounds, about one in a million draws. On one device every draw depends on the node's own
logits alone, as the text of a seed requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.core.adjustments import Adjustments
from eyas.core.ops import Ops
from eyas.core.sampling import GumbelNoise, Sampling, equal_but_for_seeds
from eyas.core.tree import Draft, Tree, Verdict, unpack_verdict
from eyas_gpu import operators
from eyas_gpu._draft_net import with_gpu_kernels

__all__ = ["GpuOps"]


@dataclass(frozen=True)
class GpuOps(Ops):
    """Scores, draws, paths, commits and draft nets by kernels.

    Attributes:
        on_cpu: use the kernels for tensors on a CPU too, where Triton's interpreter runs them;
            draft nets always use them.
    """

    draft_formats = ("auto", "fp8")
    on_cpu: bool = False

    def _suits(self, tensor: Tensor) -> bool:
        return self.on_cpu or tensor.device.type != "cpu"

    def scores(self, logits_BNV: Tensor, sampling: Sequence[Sampling], adjustments: Adjustments | None) -> Tensor:
        if not self._suits(logits_BNV) or adjustments is not None:
            return super().scores(logits_BNV, sampling, adjustments)
        if equal_but_for_seeds(sampling):
            return _scores(logits_BNV, sampling[0])
        return torch.cat([_scores(logits_BNV[b : b + 1], each).float() for b, each in enumerate(sampling)])

    def verify_deterministic(self, draft: Draft, scores_BNV: Tensor, position_B: Tensor, noise: GumbelNoise) -> Verdict:
        if not self._suits(scores_BNV):
            return super().verify_deterministic(draft, scores_BNV, position_B, noise)
        tree = draft.tree
        return unpack_verdict(operators.choose(
            scores_BNV, draft.tokens_BN, tree.parents_BN, tree.acceptable_BN, tree.depth_BN, position_B, noise.seed_B, noise.greedy_B,
            not noise.all_greedy, tree.max_depth + 1,
        ))  # fmt: skip

    def given_path(
        self, draft: Draft, verdict: Verdict, position_B: Tensor, rates_D: Tensor, seed: int, stride: int
    ) -> Verdict:
        """Return the verdict of simulated acceptance (`eyas_lab.bench.simulate`), of a draft that `choose` has verified."""
        tree = draft.tree
        return unpack_verdict(operators.given_path(
            draft.tokens_BN, tree.parents_BN, tree.acceptable_BN, tree.depth_BN, position_B, verdict.bonus_B, verdict.has_nan_B,
            rates_D, seed, stride,
        ))  # fmt: skip

    def draw(
        self, scores_BNV: Tensor, tree: Tree, position_B: Tensor, noise: GumbelNoise
    ) -> tuple[Tensor, Tensor | None]:
        if not self._suits(scores_BNV):
            return super().draw(scores_BNV, tree, position_B, noise)
        drawn_BN, has_nan_BN = operators.draw(
            scores_BNV, tree.depth_BN, position_B, noise.seed_B, noise.greedy_B, not noise.all_greedy
        )
        return drawn_BN, has_nan_BN.any(-1)

    def commit(self, store: Tensor, length_B: Tensor, path_BP: Tensor) -> None:
        if self._suits(store):
            operators.commit(store, length_B, path_BP)
        else:
            super().commit(store, length_B, path_BP)

    def draft_net(self, net: nn.Module, draft_weights: str) -> nn.Module:
        """Return the net by kernels; a net of several layers as it is, as the kernels have one for a
        draft's only layer."""
        return net if getattr(net, "later", None) else with_gpu_kernels(net, draft_weights)


def _scores(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Return the scores of rows with this Sampling; the logits themselves if it changes nothing."""
    if sampling.greedy or sampling.is_raw_softmax:
        return logits_BNV
    scores_BNV: Tensor = operators.filtered(
        logits_BNV, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
    return scores_BNV
