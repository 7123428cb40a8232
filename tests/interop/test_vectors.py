"""Other engines over the conformance vectors (packages/draft-vectors): equal texts, and as many drafts accepted in each
cycle as in eyas; or the fault that the runner names."""

import os
from pathlib import Path
from typing import Any

import pytest

import processes
from interop_engines import PROGRAMS, outside, python_of

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
    assert named(done) == ["layers_one_above"]


def named(done: Any) -> list[str]:
    """The faults that the runner named; it failed."""
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-4000:]
    return [line.split(": ")[1] for line in done.stdout.splitlines() if "fits: " in line]


def test_safeailab() -> None:
    """Guards the class for SafeAILab's code, and the vectors of EAGLE-1 against the code of its authors: chains and static trees,
    greedy and by recursive rejection with the vectors' random numbers."""
    done = run(python_of(".venv-reference"), "draft_vectors.engines.safeailab:SafeAILab")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "SafeAILab's code, float32: 7 of 7 as the vectors" in done.stdout


def test_llama_cpp() -> None:
    """Guards the class for llama.cpp, and the vectors of EAGLE-3, DFlash and DSpark; DSpark's case drafts fewer tokens than the
    block has slots, and llama.cpp cuts the block (docs/lab/findings.md)."""
    sources = Path(os.environ.get("LLAMA_CPP") or "/nowhere")
    if not (Path(os.environ.get("LLAMA_CPP_BUILD") or sources / "build") / "bin/llama-server").exists():
        pytest.skip("no llama.cpp was named: make interop LLAMA_CPP=FOLDER, with its sources and their build")
    done = run(python_of(".venv-interop"), "draft_vectors.engines.llama_cpp:LlamaCpp")
    assert named(done) == ["block_cut_short"]
    assert "FAIL  dspark-chain-greedy" in done.stdout
    assert "llama.cpp, float32: 2 of 3 as the vectors" in done.stdout


def test_openvino() -> None:
    """Guards the class for OpenVINO GenAI, and the vectors of EAGLE-3, trees too, and DFlash."""
    done = run(python_of(".venv-openvino"), "draft_vectors.engines.openvino:OpenVino")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "OpenVINO GenAI, float32: 3 of 3 as the vectors" in done.stdout


@pytest.mark.parametrize(
    ("engine", "case", "fault"),
    [("Half", "eagle3-tree", "accepted_path_not_moved"), ("Above", "eagle3-chain", "layers_one_above")],
)
def test_faults_in_openvino(engine: str, case: str, fault: str) -> None:
    """Guards docs/lab/findings.md: the runner names both faults, from texts and accepted tokens. If one is mended there, say so."""
    done = run(python_of(".venv-openvino"), f"openvino_faults:{engine}", "--only", case)
    assert named(done) == [fault]
