"""The runner that a target gets on a GPU without eyas-gpu: the model's own forward, and a line that says what to install.
Tried on a CPU."""

import logging

import pytest
import torch

import zoo
from eyas import elsewhere, kernels, runners
from eyas.core.target import Target
from eyas.errors import OptionError

INSTALL = "eyas-gpu has CUDA graphs and kernels: pip install ./packages/eyas-gpu"


@pytest.fixture(autouse=True)
def _without_eyas_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "find_part", lambda name: None)


def test_a_note_says_what_to_install(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the default: a GPU that is used slowly for want of a package."""
    target = Target(zoo.FAMILIES["llama"]())
    with caplog.at_level(logging.INFO, "eyas.runners"):
        assert runners._on_gpu(target, "auto", own=True) is target
    assert INSTALL in caplog.text


def test_what_was_asked_for_is_missing() -> None:
    target = Target(zoo.FAMILIES["llama"]())
    with pytest.warns(UserWarning, match="runs by its own forward; eyas-gpu has CUDA graphs"):
        assert runners._on_gpu(target, "on", own=True) is target
    elsewhere.part.cache_clear()
    with pytest.raises(OptionError, match="kernels compile needs the package eyas-gpu: pip install"):
        runners._on_gpu(target, "compile", own=True)


def test_no_sum_has_one_order_on_a_gpu() -> None:
    """Guards `kernels="fixed"`: an error, never another forward."""
    target = Target(zoo.FAMILIES["llama"]())
    target.device = torch.device("cuda", 0)
    with pytest.raises(OptionError, match="none whose sums have one order: on a GPU"):
        runners._with_runner(target, "fixed", True, kernels.EXACT)


def test_fp8_needs_eyas_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the line that says what to install."""
    monkeypatch.setattr(runners, "_multiplies_fp8", lambda device: True)
    with pytest.raises(
        OptionError, match=r"draft weights fp8 needs the package eyas-gpu: pip install ./packages/eyas-gpu"
    ):
        runners.with_fastest_runner(Target(zoo.FAMILIES["llama"]()), "off", draft_weights="fp8")
