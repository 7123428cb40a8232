"""Compares a runner with the model's own forward, when the runner is made."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.core.target import ModelRunner, Runner, Target
from eyas.core.tree import TargetOutput, Tree

__all__ = ["UnsuitedError", "compare", "output_pairs"]

TOLERANCE = {torch.float32: 1e-4}  # relative to the norm of all numbers; other orders of summation change less
CLOSE_ROUNDED = 0.05  # in bfloat16 and float16, unless the model's own forward rounds away more
MOST_ROUNDED = 0.3  # in any model: wrong numbers differ by more
PATH = (0, 1, 3)  # nodes of the tree, from the root to a leaf


class UnsuitedError(Exception):
    """A runner cannot run this target; the message is one line with the reason."""


@torch.inference_mode()
def output_pairs(target: Target, runner: Runner) -> list[tuple[Tensor, Tensor]]:
    """Return logits and features over a prompt and a small tree, each by the model's own forward and by the runner.

    Raises:
        ModelError: the model's own logits are NaN.
    """
    ids, count = _text(target)
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
    pairs = output_pairs(target, runner)
    tolerance = TOLERANCE.get(target.dtype) or _rounding(target, pairs[0][0])
    for expected, actual in pairs:
        difference = _difference(expected, actual)
        if not difference <= tolerance:  # NaN is not
            raise UnsuitedError(f"the model's own forward gives other numbers (by {difference:.2g})")


def _text(target: Target) -> tuple[Tensor, int]:
    """Return tokens [1, count + 4], and the number of those before the tree."""
    count = max(1, min(24, target.context - 3))  # the tree's third level has a position, too
    most = min(target.vocab_size, target.num_embeddings)
    dice = torch.Generator().manual_seed(0)
    return torch.randint(0, most, (1, count + 4), generator=dice).to(target.device), count


@torch.inference_mode()
def _rounding(target: Target, logits_1NV: Tensor) -> float:
    """Return the tolerance for a model in half precision: three times the difference that the shape of a pass makes to
    its own forward. It grows with depth and width: a random one of 8B has 7 %, a trained one 1 %.

    Args:
        logits_1NV: its own logits at the nodes of the tree of `output_pairs`.
    """
    ids, count = _text(target)
    path = [*ids[0, :count].tolist(), *(int(ids[0, count + node]) for node in PATH)]
    at_once_V = target.run_with(ModelRunner()).open(1).prefill(0, path)
    noise = _difference(logits_1NV[0, PATH[-1]], at_once_V)
    return min(max(CLOSE_ROUNDED, 3 * noise), MOST_ROUNDED)


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the distance, relative to the norm of all numbers."""
    return float((expected.float() - actual.float()).norm() / expected.float().norm())
