"""Pruned and edited models with compiled kernels: the ids of transformers, by kernels or by the model's own forward."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edited
import eyas
import processes
from eyas import kernels
from eyas.core.target import Target
from eyas.runners import UnsuitedError, make_cpu_runner
from test_defaults import llama

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiled kernels")
BY_KERNELS = {"nothing", "a narrow MLP", "a wide MLP"}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_every_edit_keeps_the_ids(part: int) -> None:
    """Bug: kernels take the shapes of the first layer for those of all, write past the end of their memory, and end the
    process. A child, so that pytest lives; edits that kernels run and such that they leave to torch."""
    names = [*edited.EDITS][part::2]
    command = [sys.executable, "-c", Path(edited.__file__).read_text(encoding="utf-8"), *names]
    done = processes.run(command, warm=True, env=processes.environment(PYTHONPATH=os.pathsep.join(sys.path)))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.endswith("is right")] == [
        f"{name} is right" for name in names
    ]


@pytest.mark.parametrize("name", ["a wide MLP", "torch's norm", "fewer heads", "an epsilon", "an odd MLP"])
def test_what_runs_by_kernels(name: str) -> None:
    """Guards the speed of models whose MLPs are pruned to other widths, and the reason for the others, which names the
    layer."""
    model = llama()
    edited.EDITS[name](model)
    if name in BY_KERNELS:
        assert make_cpu_runner(Target(model)).name == "kernels"
    else:
        with pytest.raises(UnsuitedError, match=r"layer \d is pruned or edited: "):
            make_cpu_runner(Target(model))


@pytest.mark.filterwarnings("ignore")
def test_torch_quantised_as_a_whole() -> None:
    """Bug: quantize_dynamic with kernels on is a TypeError, as its `weight` is a method; with drafts the ids differ and
    nobody says so: these layers round their inputs by all tokens of a pass."""
    quantised: Any = torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)
    for setting in ("on", "auto", "off"):
        with pytest.warns(UserWarning, match=r"torch rounds the inputs of .* by all tokens of a pass together"):
            eyas.load(quantised, tokenizer=False, kernels=setting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert edited.answer(quantised, kernels=setting, method="vanilla") == edited.plain(quantised)
