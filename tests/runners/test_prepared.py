"""Which runner a target gets, and what is set before its first forward."""

import pytest
import torch

from eyas import runners


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
