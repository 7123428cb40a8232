"""The runner that a target gets on a GPU by default, without eyas-gpu: proven graphs, or the model's own forward. Tried
on a CPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import zoo
from eyas import drafters, elsewhere, kernels, runners
from eyas.core.engine import Decoder, Request
from eyas.core.ops import REFERENCE
from eyas.core.sampling import Sampling
from eyas.core.target import Target
from eyas.errors import OptionError
from eyas.runners import graphs
from eyas.runners.graphs import GraphRunner
from fake_graphs import captured_without_gpu
from reference import plain_decode, run


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: captured_without_gpu)
    monkeypatch.setattr(elsewhere, "find_part", lambda name: None)


def with_fastest_runner(kind: str = "auto", family: str = "llama") -> Target:
    return runners._with_graphs(Target(zoo.FAMILIES[family]()), kind, own=True)


def test_graphs_by_default(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the default: recorded cycles of the model's own code, plain decoding's text, and one line about kernels."""
    with caplog.at_level(logging.INFO, "eyas.runners"):
        target = with_fastest_runner()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "CUDA graphs run the model's own code; eyas-gpu has faster kernels"
    ]
    assert "pip install ./packages/eyas-gpu" in caplog.text
    assert isinstance(target.runner, GraphRunner)
    assert (target.runner.fused, target.runner.ops) == (None, REFERENCE)
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
    assert runners._with_graphs(target, "auto", own=True) is target
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        assert runners._with_graphs(target, "on", own=True) is target


def test_hybrids_run_by_their_own_forward() -> None:
    """Guards models with recurrent state: their trees are sorted on the host, which a graph cannot do."""
    target = Target(zoo.HYBRIDS["lfm2"]())
    assert runners._with_graphs(target, "auto", own=True) is target
    with pytest.warns(UserWarning, match="no CUDA graphs"):
        assert runners._with_graphs(target, "on", own=True) is target


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
