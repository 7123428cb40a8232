"""Features of whole texts by the kernels, as training reads them."""

from __future__ import annotations

import pytest
import torch

import zoo
from eyas import kernels
from eyas.core.target import Target
from eyas_train import kernel_features
from runners.test_cpu import SIZES, ids, model

pytestmark = pytest.mark.slow

LENGTHS = (5, 31, 18)
LAYERS = (0, 2, 3, 4)


def exact_features(target: Target) -> torch.Tensor:
    """The features of each text by the model's own forward, read alone."""
    texts = [torch.tensor([ids(length, length)]) for length in LENGTHS]
    return torch.cat([target.encode(text, LAYERS)[0] for text in texts])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rounded", [False, True])
def test_features_are_the_models_own(family: str, rounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards masks, positions and the order of layers in the packed pass: 1e-4 where nothing is rounded, and close with
    rounded weights. Texts of several lengths share a pass, so a text that sees another fails."""
    target = Target(model(family))
    if not rounded:
        monkeypatch.setattr(kernel_features, "ROUNDED", kernels.EXACT)
    read, expected = kernel_features.feature_reader(target), exact_features(target)
    assert read is not None
    tokens_M = torch.cat([torch.tensor(ids(length, length)) for length in LENGTHS])
    found = read(tokens_M, LENGTHS, LAYERS)
    assert (found - expected).norm() <= (0.06 if rounded else 1e-4) * expected.norm()


def test_targets_that_the_kernels_do_not_know_are_read_by_their_own_forward() -> None:
    assert kernel_features.feature_reader(Target(zoo.FAMILIES["gemma2"]())) is None
    assert kernel_features.feature_reader(Target(zoo.tiny("llama", **SIZES).bfloat16())) is None
