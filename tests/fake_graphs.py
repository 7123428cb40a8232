"""A stand-in for the capture of CUDA graphs, for machines without a GPU; a fixture and prompts to try it on."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

import zoo
from eyas import kernels
from eyas_gpu.graphs import tensors_of

T = TypeVar("T")


@pytest.fixture
def without_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification, noise and commits by torch, as on a GPU, not by the CPU's kernels."""
    monkeypatch.setattr(kernels, "available", lambda: False)


def captured_without_gpu(work: Callable[[], T], undo: Callable[[], None]) -> tuple[T, Callable[[], None]]:
    """Run `work` and return its result, and a function that runs it again.

    As with a graph, the results of every run lie in the memory of the first one, and everything is
    computed from the inputs that were there at the capture.
    """
    result = work()
    undo()

    def replay() -> None:
        for captured, new in zip(tensors_of(result), tensors_of(work()), strict=True):
            if captured.data_ptr() != new.data_ptr():
                captured.copy_(new)

    return result, replay


def prompt(length: int) -> tuple[int, ...]:
    """Return random token ids, others for each length."""
    return tuple(torch.randint(3, zoo.VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())
