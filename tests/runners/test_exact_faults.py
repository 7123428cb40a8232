"""Tests of tests/exact.py: kernels in which the bits of a token depend on what else is in the pass are found, by logits
and by ids."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import exact
from exact import PASSES, Referee, by_kernels, model
from eyas.formats import WeightFormat
from eyas.kernels import _build
from test_kernels import built_with, needs

ISA = "x86-64-v3"
VALUES = """for_shared_slots<4 * LANES>(
            values, [&](int64_t place, const char* const* value, int64_t count) {
                add(0, pairs, place, value, count);
            });
"""
DIVISION = """        for (int64_t n = 0; n < pairs; n++)
            for (int64_t d = 0; d < h; d++) out[n][d] /= totals[n];
"""


@dataclass(frozen=True)
class Fault:
    """What of a file of the kernels is replaced by what, and the mode and the model that show it."""

    mode: WeightFormat
    family: str
    file: str
    changes: tuple[tuple[str, str], ...]


FAULTS = {
    "a tile of one row sums its products in one block": Fault(
        WeightFormat("bfloat16"), "mistral", "tiles.h",
        (("for (int m = 0; m < ROWS; m++)\n                for (int half = 0; half < 2; half++)\n                    total",
          "if (ROWS == 1 && k + SUM_BLOCK < inputs) continue;\n"
          "            for (int m = 0; m < ROWS; m++)\n                for (int half = 0; half < 2; half++)\n                    total"),),
    ),
    "the scale of activations depends on the rows of a tile": Fault(
        WeightFormat("int8", "int8"), "llama", "dots.h",
        (("float top = largest[0];", "float top = largest[0] * (rows > 1 ? 1.0001f : 1);"),),
    ),
    "values of the prompt are added last where a pass has several queries": Fault(
        WeightFormat("int4", "int16"), "llama", "layers.h",
        ((VALUES, f"const auto shared_values = [&] {{ {VALUES} }};\n        if (queries == 1) shared_values();\n"),
         (DIVISION, f"        if (queries > 1) shared_values();\n{DIVISION}")),
    ),
}  # fmt: skip


@pytest.mark.exhaustive
@needs
@pytest.mark.skipif(ISA not in _build.runnable_isas(), reason=f"the faults are compiled for {ISA}")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison itself: each fault changes the last bits of a token beside others, and nothing else."""
    fault, sources = FAULTS[name], tmp_path / "cpu"
    shutil.copytree(_build.SOURCES, sources)
    code = (sources / fault.file).read_text()
    for before, after in fault.changes:
        assert code.count(before) == 1, f"{fault.file} has changed: mend the fault"
        code = code.replace(before, after)
    (sources / fault.file).write_text(code)
    monkeypatch.setattr(_build, "SOURCES", sources)
    monkeypatch.setattr(_build, "MAIN", sources / "kernels.cpp")
    with built_with(*_build.ISAS[ISA][0], "-O1"):
        plain, other = (by_kernels(model(fault.family), fault.mode) for _ in range(2))
        logits = exact.compare(Referee(plain), PASSES["trees"](other, random.Random(0), 0.1))
        ids = exact.compare_ids(plain, other, 0.1)
    assert logits.different > logits.compared / 4
    assert ids.different
