"""The runner that a target gets on a GPU without eyas-gpu: the model's own forward, and a line that says what to install.
Tried on a CPU."""

import logging

import pytest
import torch

import zoo
from eyas import elsewhere, runners
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


def test_attention_by_cudnn_is_off_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a plan for every new shape, half a second each; and silently wrong text of models with
    few key-value heads."""
    switched = list[bool]()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    runners._disable_cudnn_attention(torch.device("cpu"))
    assert switched == []
    runners._disable_cudnn_attention(torch.device("cuda", 0))
    assert switched == [False]
