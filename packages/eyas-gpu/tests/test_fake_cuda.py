"""Recorded cycles on a GPU that is not there: nothing of the host in them, and no more launches
than docs/lab/gpu_plan.md says."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RUNS = [Path(__file__).parents[above] / "runs" for above in (3, 1)]
pytestmark = pytest.mark.slow


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in RUNS:
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("gpu_counts")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in RUNS:
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("_fake_cuda")


def is_tried(case: Any) -> bool:
    """Return whether it is one of the half of a method's plain combinations that hold every pair of their parts."""
    ways = ("eagle2", "eagle3", "seagle", "medusa", "hydra")
    special = case.rows > 1 or case.context > 4096 or case.top_p < 1 or case.verify != "real" or bool(case.options)
    if special or case.method not in ways:
        return True
    return (ways.index(case.method) + bool(case.temperature) + (case.precision == "fp8") + case.kernels) % 2 == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["vanilla", "eagle1", "eagle2", "eagle3", "seagle", "medusa", "hydra"])
def test_cycles_launch_what_the_page_says(counts: Any, method: str) -> None:
    """Bugs: a `.item()`, a mask or a number from the host inside a recorded cycle, which no graph
    can hold; an attention mask of an odd width, which is padded at every level; an operation more a
    layer or a level, which nobody notices on a CPU. Mended by: python packages/eyas-gpu/runs/gpu_counts.py
    --write. Where a method has cases of two temperatures, precisions and ways, each pair of these comes once."""
    page = counts.written(counts.PAGE.read_text(encoding="utf-8"))
    rows = [counts.row(case) for case in counts.CASES if case.method == method and is_tried(case)]
    assert rows
    assert [why for row in rows if (why := counts.difference(row, page))] == []


def test_the_page_has_no_other_rows(counts: Any) -> None:
    """Bug: a method goes, and its figures stay."""
    assert set(counts.written(counts.PAGE.read_text(encoding="utf-8"))) == {case.key for case in counts.CASES}


def test_differences_are_seen(counts: Any) -> None:
    """A test of the test: one launch more, a row that is missing, and a page that is far behind."""
    row = ["eagle3", "0", "bf16", "kernels", "1,000", "41", "30", "39", "13", "2,400", "25.00"]
    page = counts.written(f"{counts.BEGIN}\n{counts.table([row])}\n{counts.END}")
    assert counts.difference(row, page) is None
    assert "verify is 40, the page says 39" in counts.difference([*row[:7], "40", *row[8:]], page)
    assert "renew it" in counts.difference([*row[:9], "2,000", row[10]], page)
    assert "not on the page" in counts.difference(["eagle4", *row[1:]], page)


def faults(fake: Any, work: Any) -> list[str]:
    """The faults that are found in a recording of the work."""
    with fake.fake_cuda() as mode, fake.logged_by_stage(mode) as capture:
        capture(lambda: work(torch.zeros(4, 6, device="cuda")), lambda: None)
        return list(capture.logs[0].faults)


def test_faults_are_seen(fake: Any) -> None:
    """A test of the test: each kind of mistake is named, and sound work is not."""

    def sound(x: Any) -> Any:
        x[:, 1:3] = x[torch.arange(4, device=x.device), 2:4] + 1
        return x[..., None].to(torch.bfloat16)[1:].contiguous().sum()

    def odd_mask(x: Any) -> Any:
        q = torch.zeros(1, 2, 4, 8, device=x.device)
        return torch.nn.functional.scaled_dot_product_attention(
            q, q[:, :, :3], q[:, :, :3], attn_mask=x[None, None, :, :3]
        )

    assert faults(fake, sound) == []
    assert any(
        "torch.tensor of [2]" in fault
        for fault in faults(fake, lambda x: x[:2, 0] + torch.tensor([1, 2], device=x.device))
    )
    assert any("moved from cpu to cuda" in fault for fault in faults(fake, lambda x: x + torch.ones(6).to(x.device)))
    assert any("cpu[6]" in fault for fault in faults(fake, lambda x: (torch.ones(6) + 1, x)[1]))
    assert faults(fake, odd_mask) == ["rest: a mask of width 3, which is padded"]
    with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        faults(fake, lambda x: x.sum().item())


def test_launches_are_counted(fake: Any) -> None:
    """A test of the test: views launch nothing; bytes are those that are read and written, repeated
    ones once."""

    def work(x: Any) -> Any:
        view = x[1:].t().expand(2, 6, 3)
        return view * 2 + torch.nn.functional.linear(x, x)[0, 0]

    with fake.fake_cuda() as mode, fake.logged_by_stage(mode) as capture:
        capture(lambda: work(torch.empty(4, 6, device="cuda")), lambda: None)
        launches = [(launch.name, launch.bytes) for launch in capture.logs[0].launches]
    assert launches == [
        ("mul", 4 * (18 + 36)),
        ("linear", 4 * (24 + 24 + 16)),
        ("add", 4 * (36 + 1 + 36)),
    ]
