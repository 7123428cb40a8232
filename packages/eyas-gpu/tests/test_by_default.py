"""The runner that a target gets on a GPU by default, without kernels: proven graphs, or the model's own forward. Tried on
a CPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import zoo
from eyas import drafters, kernels, runners
from eyas.core.engine import Decoder, Request
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas_gpu import graphs, runner
from eyas_gpu._fp8 import TORCH
from eyas_gpu.graphs import GraphRunner
from fake_graphs import captured_without_gpu
from reference import plain_decode, run


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: captured_without_gpu)
    monkeypatch.setattr(runner, "available", lambda device: False)


def with_fastest_runner(kind: str = "auto", family: str = "llama") -> Target:
    return runner.with_graphs(Target(zoo.FAMILIES[family]()), kind, own=True)


def test_graphs_without_kernels() -> None:
    """Guards devices without Triton: recorded cycles of the model's own code, and plain decoding's text."""
    target = with_fastest_runner()
    assert isinstance(target.runner, GraphRunner)
    assert (target.runner.fused, target.runner.ops) == (None, TORCH)
    request = Request((5, 6, 7), 8, Sampling())
    tokens, _ = run(Decoder(target, drafters.find("vanilla").load(None, target)), [request])
    assert list(tokens[0]) == plain_decode(zoo.FAMILIES["llama"](), request)


def test_a_graph_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a driver that refuses something ends every answer, although the model's own forward
    would serve."""

    def wrong(work: Any, undo: Any) -> Any:
        output, replay = captured_without_gpu(work, undo)
        return output, lambda: (replay(), output.logits_BNV.mul_(-1))

    def broken(work: Any, undo: Any) -> Any:
        raise OSError("no assembler")

    for capture, reason in ((wrong, "other numbers"), (broken, "OSError: no assembler")):
        monkeypatch.setattr(graphs, "CudaCapture", lambda device, capture=capture: capture)
        with pytest.warns(UserWarning, match=f"runs by its own forward, as a CUDA graph fails on this GPU: .*{reason}"):
            assert with_fastest_runner().runner.name == "model"


@pytest.mark.slow
def test_loading_decodes_a_little(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the first answer: what it needs has been recorded, and compiled, before it. A line
    says how long that took."""
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


def test_growing_positions_have_no_graphs() -> None:
    """Guards models whose frequencies depend on the length: silent by default, said where graphs
    were asked for."""
    target = Target(zoo.llama_dynamic())
    assert runner.with_graphs(target, "auto", own=True) is target
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        assert runner.with_graphs(target, "on", own=True) is target


def test_hybrids_run_by_their_own_forward() -> None:
    """Guards models with recurrent state: their trees are sorted on the host, which a graph cannot do."""
    target = Target(zoo.HYBRIDS["lfm2"]())
    assert runner.with_graphs(target, "auto", own=True) is target
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        assert runner.with_graphs(target, "on", own=True) is target
