"""llama.cpp and OpenVINO GenAI run our heads as their own converters make them from an export: equal
texts, and as much accepted.

llama.cpp is compiled, which takes long: LLAMA_CPP names its sources, LLAMA_CPP_BUILD its build
(default: `build` in them).
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas import checkpoints
from eyas_train import exports
from interop_engines import ours, python_of

sys.path.append(str(Path(__file__).parents[2] / "runs"))
from _peers import DRAFTS, Workshop, mean_length

pytestmark = pytest.mark.slow
LIMIT = 64


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], heads: dict[str, Path]) -> tuple[list[list[int]], float]:
    """Ids of plain decoding, and eyas' mean acceptance length."""
    return ours(prompts[:12], heads["eagle3"], "eagle3", DRAFTS, LIMIT)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    python_of(".venv-interop")
    sources = os.environ.get("LLAMA_CPP") or None
    build = os.environ.get("LLAMA_CPP_BUILD") or (sources and f"{sources}/build")
    folder = tmp_path_factory.mktemp("converted")
    return Workshop(folder, 1, sources and Path(sources), build and Path(build))  # type: ignore[arg-type]


def answers(ask: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [ask("answer", ids=ids, max_tokens=LIMIT)["ids"] for ids in prompts]


@pytest.mark.parametrize("writer", ["converter", "export"])
def test_llama_cpp(
    writer: str,
    workshop: Workshop,
    prompts: list[list[int]],
    heads: dict[str, Path],
    expected: tuple[list[list[int]], float],
    tmp_path: Path,
) -> None:
    """Guards against an export that the converter takes, or a file that `eyas export --format gguf` writes, and that the
    runner computes otherwise. False alarm: near-ties in drafts; 4 %."""
    if workshop.llama_build is None or not (workshop.llama_build / "bin/llama-server").exists():
        pytest.skip("no llama.cpp was named: make interop LLAMA_CPP=FOLDER, with its sources and their build")
    head = None
    if writer == "export":
        head = tmp_path / "head.gguf"
        known = checkpoints.ExportTarget(str(workshop.gguf(workshop.target(), "f32")))
        exports.export(checkpoints.load(heads["eagle3"]), "gguf", head, known, "f32")
    with workshop.llama_server("f32", drafting=True, head=head) as ask:
        found, length = answers(ask, prompts[:12]), mean_length(ask("counts"))
    equal = sum(map(list.__eq__, found, expected[0]))
    print(f"llama.cpp, head by {writer}: {equal} of 12 texts equal; mean length {length}, eyas {expected[1]:.3f}")
    assert found == expected[0]
    assert length == pytest.approx(expected[1], rel=0.04)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_openvino(
    method: str,
    workshop: Workshop,
    prompts: list[list[int]],
    heads: dict[str, Path],
    trained: Callable[[str], Path],
) -> None:
    """Guards against an export that the converter takes and the runner computes otherwise. The DFlash head is a small one
    that has learnt the answers by heart. False alarm: near-ties in drafts; 1 %."""
    python, dflash = python_of(".venv-openvino"), method == "dflash"
    head = trained(method) if dflash else heads[method]
    ids, mean = ours(prompts[:12], head, method, DRAFTS, LIMIT, cut=True)
    if dflash:
        workshop = replace(workshop, dflash=head)
    form = workshop.dflash_head() if dflash else workshop.openvino_head()
    models = {"target": workshop.openvino(workshop.target(), "fp32"), "head": workshop.openvino(form, "fp32")}
    with workshop.program(
        python, "with_openvino.py", f"openvino-{method}", tokens=DRAFTS, dflash=dflash, **models
    ) as ask:
        found, length = answers(ask, prompts[:12]), mean_length(ask("counts"))
    equal = sum(map(list.__eq__, found, ids))
    print(f"OpenVINO GenAI, {method}: {equal} of 12 texts equal; mean length {length}, eyas {mean:.3f}")
    assert found == ids
    assert length == pytest.approx(mean, rel=0.01)
