"""Compares a runner with the model's own forward, when the runner is made."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.core.target import ModelRunner, Runner, Target
from eyas.core.tree import TargetOutput, Tree

__all__ = ["UnsuitedError", "compare", "output_pairs"]

TOLERANCE = {torch.float32: 1e-4}  # relative to the norm of all numbers; other orders of summation change less
CLOSE_ROUNDED = 0.05  # in bfloat16 and float16


class UnsuitedError(Exception):
    """A runner cannot run this target; the message is one line with the reason."""


@torch.inference_mode()
def output_pairs(target: Target, runner: Runner) -> list[tuple[Tensor, Tensor]]:
    """Return logits and features over a prompt and a small tree, each by the model's own forward and by the runner.

    Raises:
        ModelError: the model's own logits are NaN.
    """
    count = max(1, min(24, target.context - 3))  # the tree's third level has a position, too
    ids = torch.randint(
        0, min(target.vocab_size, target.num_embeddings), (1, count + 4), generator=torch.Generator().manual_seed(0)
    ).to(target.device)
    tree = Tree.build(torch.tensor([[-1, 0, 0, 1]], device=target.device), 2)
    outputs = list[TargetOutput]()
    for run in (ModelRunner(), runner):
        session = target.run_with(run).open(1, (target.num_layers // 2, target.num_layers))
        session.prefill(0, ids[0, :count].tolist())
        outputs.append(session.forward(ids[:, count:], tree))
    expected, actual = outputs
    if torch.isnan(expected.logits_BNV).any():
        raise target.nan_error(ids[0].tolist())
    return [(expected.logits_BNV, actual.logits_BNV), (expected.features_BNF, actual.features_BNF)]


def compare(target: Target, runner: Runner) -> None:
    """Raise UnsuitedError if logits or features differ between the runner and the model's own forward."""
    tolerance = TOLERANCE.get(target.dtype, CLOSE_ROUNDED)
    for expected, actual in output_pairs(target, runner):
        difference = float((expected.float() - actual.float()).norm() / expected.float().norm())
        if not difference <= tolerance:  # NaN is not
            raise UnsuitedError(f"the model's own forward gives other numbers (by {difference:.2g})")
