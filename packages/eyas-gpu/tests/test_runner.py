"""This distribution gives eyas graphs on a GPU, with its kernels after they have been tried, else with torch's. These tests need no GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import zoo
from eyas import drafters, elsewhere, kernels, runners
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import ModelRunner, Target
from eyas.errors import OptionError
from eyas_gpu import graphs, runner
from eyas_gpu._fp8 import TORCH, TorchOps
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


@pytest.mark.parametrize(
    ("family", "has_kernels", "fused", "ops"),
    [("llama", True, GpuModelLayers, GpuOps), ("llama", False, None, TorchOps), ("gemma2", True, None, GpuOps)],
)
def test_graphs_by_default(
    family: str, has_kernels: bool, fused: Any, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the default: recorded cycles, of layers by kernels where the device has Triton and the family suits, and
    plain decoding's text."""
    monkeypatch.setattr(runner, "available", lambda device: has_kernels)
    target = runner.with_graphs(Target(zoo.FAMILIES[family]()), "auto", own=True)
    assert isinstance(target.runner, GraphRunner)
    assert isinstance(target.runner.fused, fused or type(None))
    assert isinstance(target.runner.ops, ops)
    request = Request((5, 6, 7), 8, Sampling())
    tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target)), [request])
    assert list(tokens[0]) == plain_decode(zoo.FAMILIES[family](), request)


def test_a_model_that_drafts_has_kernels() -> None:
    """Guards the second model of `small_model`, whose weights nobody joins."""
    target = runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "auto", own=True)
    draft = target.runner.wrap_draft_model(Target(zoo.FAMILIES["qwen2"]()), "exact")
    assert isinstance(draft.runner, GraphRunner)
    assert isinstance(draft.runner.fused, GpuModelLayers)
    assert draft.runner.fused.layers[0].qkv.weight_XD is None


def wrong(work: Any, undo: Any) -> Any:
    output, replay = captured_without_gpu(work, undo)
    return output, lambda: (replay(), output.logits_BNV.mul_(-1))


def broken(work: Any, undo: Any) -> Any:
    raise OSError("no assembler")


@pytest.mark.parametrize(("capture", "reason"), [(wrong, "other numbers"), (broken, "OSError: no assembler")])
def test_what_fails_is_not_used(capture: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a driver or a kernel that fails ends every answer, although the model's own code would serve."""
    monkeypatch.setattr(runner, "fault_of_kernels", lambda device, ops: "attention gives other numbers")
    with pytest.warns(UserWarning, match="one fails on this GPU: attention gives other numbers"):
        target = runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "on", own=True)
    assert isinstance(target.runner, GraphRunner)
    assert (target.runner.fused, target.runner.ops) == (None, TORCH)
    monkeypatch.setattr(runner, "available", lambda device: False)
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: capture)
    with pytest.warns(UserWarning, match=f"runs by its own forward, as a CUDA graph fails on this GPU: .*{reason}"):
        assert runner.with_graphs(Target(zoo.FAMILIES["llama"]()), "auto", own=True).runner.name == "model"


@pytest.mark.parametrize("model", [zoo.llama_dynamic, zoo.HYBRIDS["lfm2"]])
def test_models_without_graphs(model: Any) -> None:
    """Guards models whose frequencies depend on the length, and those whose recurrent state is sorted on the host: silent by
    default, said where graphs were asked for."""
    target = Target(model())
    assert runner.with_graphs(target, "auto", own=True) is target
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        assert runner.with_graphs(target, "on", own=True) is target


@pytest.mark.slow
def test_loading_decodes_a_little(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the first answer: what it needs has been recorded, and compiled, before it. A line says how long that took."""
    counts = list[int]()

    def counted(work: Any, undo: Any) -> Any:
        counts.append(1)
        return captured_without_gpu(work, undo)

    target = Target(zoo.FAMILIES["llama"]())
    recorded = target.run_with(GraphRunner(target, counted))
    with caplog.at_level(logging.INFO, "eyas.runners.warm_up"):
        runners.warm_up(drafters.find("eagle2").random(recorded, seed=1))
    recordings = len(counts)
    assert recordings >= 2, "greedily, and by a temperature"
    assert "warmed up in" in caplog.text
    runners.warm_up(drafters.find("eagle2").random(target, seed=1))
    assert len(counts) == recordings, "nothing is recorded without graphs"


def test_what_a_cpu_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `draft_weights="fp8"` beside the model's own forward, and what is refused without a GPU."""
    target = Target(zoo.FAMILIES["llama"]())
    for options, said in (
        ({"draft_weights": "fp8"}, r"compute capability 8\.9"),
        ({"draft_weights": "fp4"}, "fp8"),
        ({"kernels": "compile"}, "kernels compile is for GPUs"),
    ):
        with pytest.raises(OptionError, match=said):
            runners.with_fastest_runner(target, **options)
    monkeypatch.setattr(runners, "_multiplies_fp8", lambda device: True)
    target = runners.with_fastest_runner(target, "off", draft_weights="fp8")
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
