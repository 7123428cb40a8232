"""vLLM's CPU build over the conformance vectors (packages/draft-vectors): equal texts, and as many drafts accepted in each
cycle as in eyas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import processes
from interop_engines import PROGRAMS, outside

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / "packages" / "draft-vectors" / "src"


def run(python: Path, engine: str, *options: str) -> Any:
    """Run the runner in an engine's environment, which has no eyas."""
    environment = {**outside(), "PYTHONPATH": f"{SOURCE}:{PROGRAMS}"}
    return processes.run([python, "-m", "draft_vectors", engine, *options], env=environment)


def test_vllm(interop: Path) -> None:
    """Guards the class for vLLM, and the vectors of EAGLE-1, EAGLE-3, DFlash and P-EAGLE against a foreign implementation.
    In float32: in bfloat16 its CPU build ends with an illegal instruction on some processors."""
    done = run(interop, "draft_vectors.engines.vllm:Vllm")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "vLLM, float32: 4 of 4 as the vectors" in done.stdout


def test_a_fault_in_vllm(interop: Path) -> None:
    """Guards the diagnosis where it is needed: vLLM is told other layers, and shows texts and accepted tokens only."""
    done = run(interop, "vllm_layers:Above", "--only", "eagle3-chain")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-4000:]
    assert [line.split(": ")[1] for line in done.stdout.splitlines() if "fits: " in line] == ["layers_one_above"]
