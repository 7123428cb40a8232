"""What eyas gets from this distribution on a GPU: kernels that have been tried, or torch. Tried on a CPU."""

from __future__ import annotations

import pytest
import torch

import zoo
from eyas import drafters, elsewhere, kernels, runners
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import ModelRunner, Target
from eyas_gpu import graphs, runner
from eyas_gpu._fp8 import TORCH
from eyas_gpu.cycle import GpuOps
from eyas_gpu.graphs import GraphRunner
from eyas_gpu.layers import GpuModelLayers
from fake_graphs import captured_without_gpu
from reference import plain_decode, run


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: captured_without_gpu)
    monkeypatch.setattr(elsewhere, "find_part", lambda name: runner)
    monkeypatch.setattr(runner, "available", lambda device: True)
    monkeypatch.setattr(runner, "fault_of_kernels", lambda device, ops: "")
    monkeypatch.setattr(runner, "_kernels_work", runner._kernels_work.__wrapped__)  # nothing is remembered


def test_graphs_of_kernels_by_default() -> None:
    """Guards the default: recorded cycles of layers by kernels, and plain decoding's text."""
    target = runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "auto", own=True)
    assert isinstance(target.runner, GraphRunner)
    assert isinstance(target.runner.fused, GpuModelLayers)
    assert isinstance(target.runner.ops, GpuOps)
    request = Request((5, 6, 7), 8, Sampling())
    tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target)), [request])
    assert list(tokens[0]) == plain_decode(zoo.FAMILIES["llama"](), request)


def test_a_model_that_drafts_has_kernels() -> None:
    """Guards the second model of `small_model`, whose weights nobody joins."""
    target = runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "auto", own=True)
    draft = target.runner.wrap_draft_model(Target(zoo.FAMILIES["qwen2"]()), "exact")
    assert isinstance(draft.runner, GraphRunner)
    assert isinstance(draft.runner.fused, GpuModelLayers)
    assert draft.runner.fused.layers[0].qkv.weight_XD is None


def test_layers_of_another_shape_run_by_their_own_code() -> None:
    target = runner.with_graphs(Target(zoo.FAMILIES["gemma2"]()), "auto", own=True)
    assert isinstance(target.runner, GraphRunner)
    assert target.runner.fused is None
    assert isinstance(target.runner.ops, GpuOps)


def test_kernels_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the text: graphs of the model's own code, with torch's operations around it."""
    monkeypatch.setattr(runner, "fault_of_kernels", lambda device, ops: "attention gives other numbers")
    with pytest.warns(UserWarning, match="one fails on this GPU: attention gives other numbers"):
        target = runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "on", own=True)
    assert isinstance(target.runner, GraphRunner)
    assert (target.runner.fused, target.runner.ops) == (None, TORCH)


def test_fp8_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `draft_weights="fp8"` beside the model's own forward."""
    monkeypatch.setattr(runners, "_multiplies_fp8", lambda device: True)
    target = runners.with_fastest_runner(Target(zoo.FAMILIES["llama"]()), "off", draft_weights="fp8")
    assert isinstance(target.runner, ModelRunner)
    assert (target.runner.ops, target.draft_weights) == (TORCH, "fp8")


def test_a_device_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of loading: the trial compiles every kernel."""
    tried = list[torch.device]()
    monkeypatch.undo()
    monkeypatch.setattr(runner, "available", lambda device: True)
    monkeypatch.setattr(runner, "fault_of_kernels", lambda device, ops: tried.append(device) or "")
    runner._kernels_work.cache_clear()
    assert all(isinstance(runner.operations(torch.device("cuda", 0)), GpuOps) for _ in range(2))
    runner._kernels_work.cache_clear()
    assert tried == [torch.device("cuda", 0)]
