"""Compares a runner with the model's own forward, when the runner is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core.target import ModelRunner, Runner, Target
from eyas.core.tree import TargetOutput, Tree
from eyas.errors import EyasError, one_line

__all__ = ["UnsuitedError", "compare", "fault_of_runner", "output_pairs"]

TOLERANCE = {torch.float32: 1e-4}  # relative to the norm of all numbers; other orders of summation change less
CLOSE_ROUNDED = 0.05  # in bfloat16 and float16, of a model of few layers
# of deeper ones: how the difference may grow from one layer to the next, and how large it may become
GROWTH, STEP, MOST_ROUNDED = 1.5, 0.02, 0.3


class UnsuitedError(Exception):
    """A runner cannot run this target; the message is one line with the reason."""


@torch.inference_mode()
def output_pairs(target: Target, runner: Runner, layers: Sequence[int] = ()) -> list[tuple[Tensor, Tensor]]:
    """Return logits and features over a prompt and a small tree, each by the model's own forward and by the runner.

    Args:
        layers: of the features; (): the middle one and the last.

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
        session = target.run_with(run).open(1, tuple(layers) or (target.num_layers // 2, target.num_layers))
        session.prefill(0, ids[0, :count].tolist())
        outputs.append(session.forward(ids[:, count:], tree))
    expected, actual = outputs
    if torch.isnan(expected.logits_BNV).any():
        raise target.nan_error(ids[0].tolist())
    return [(expected.logits_BNV, actual.logits_BNV), (expected.features_BNF, actual.features_BNF)]


def compare(target: Target, runner: Runner) -> None:
    """Raise UnsuitedError if logits or features differ between the runner and the model's own forward.

    In half precision a deep model rounds away more than a fixed share: a random one of 8B 7 %, a trained one 1 %. There
    the difference may grow from layer to layer, and must not jump.
    """
    exact = TOLERANCE.get(target.dtype)
    difference = max(_difference(*pair) for pair in output_pairs(target, runner))
    if difference <= (exact or CLOSE_ROUNDED):
        return
    if exact is not None or not difference <= MOST_ROUNDED or not _grows_slowly(target, runner):  # NaN is not
        raise UnsuitedError(f"the model's own forward gives other numbers (by {difference:.2g})")


def fault_of_runner(target: Target, runner: Runner) -> str:
    """Return the failure of a runner: it raises something, or gives other numbers than the model's own
    forward; "" if it does neither."""
    try:
        compare(target, runner)
    except EyasError:
        raise
    except Exception as error:  # whatever a capture, a compiler or a driver raises
        return f"{type(error).__name__}: {one_line(error, 200)}"
    return ""


def _grows_slowly(target: Target, runner: Runner) -> bool:
    """Return whether no layer adds more to the difference than rounding does."""
    pair = output_pairs(target, runner, range(1, target.num_layers + 1))[1]
    before = 0.0
    for expected, actual in zip(*(features.chunk(target.num_layers, -1) for features in pair), strict=True):
        difference = _difference(expected, actual)
        if not difference <= GROWTH * before + STEP:
            return False
        before = difference
    return True


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the distance, relative to the norm of all numbers; infinite for NaN."""
    distance = float((expected.float() - actual.float()).norm() / expected.float().norm())
    return distance if distance == distance else float("inf")
