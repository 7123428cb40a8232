"""This CPU as a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eyas import passes
from eyas.hardware.machine import Used
from eyas_lab.predict import Machine, measure, read_model

CONFIG = Path(__file__).resolve().parents[4] / "tiny" / "eyas_tiny" / "weights" / "config.json"


@pytest.mark.slow
def test_this_cpu_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rate is missing or not a number; it is measured again each time, or not when told to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(passes, "REPEATS", 1)
    monkeypatch.setattr(measure, "LARGE", measure.CACHED)
    monkeypatch.setattr(measure, "TOKENS", (1, 8))
    monkeypatch.setattr(measure, "used", lambda before: Used(1.0, 99.0))
    measure.measured_machine("int8")
    assert not list(tmp_path.rglob("machine-*")), "a busy machine's figures are kept"
    monkeypatch.setattr(measure, "used", lambda before: Used(1.0, 0.0))
    machine = measure.measured_machine("int8")
    assert set(machine.flops) == {"int8", "draft"}
    assert all(rate > 0 for table in machine.flops.values() for rate in table.values())
    assert machine.bandwidth > 0
    assert machine.cycle_seconds > 0
    monkeypatch.setattr(measure, "measure", lambda *given: pytest.fail("measured again"))
    assert measure.measured_machine("int8") == machine
    with pytest.raises(pytest.fail.Exception):
        measure.measured_machine("int8", force=True)
    with pytest.raises(pytest.fail.Exception):
        measure.measured_machine("float32")


def test_the_overlap_is_found() -> None:
    """Bug: bandwidth and overlap do not explain the passes that they are taken from."""
    sizes = read_model(str(CONFIG))
    made = Machine("", 8e8, {"float32": {1: 1e9}}, 0.3)
    took = {n: made.seconds(4.0 * sizes.weights, sizes.flops(n, 32), "float32", n, 1.0)[0] for n in (1, 2, 4, 8)}
    found = measure._with_bandwidth(replace(made, bandwidth=1.0, overlap=1.0), "float32", took, sizes)
    assert (found.bandwidth, found.overlap) == pytest.approx((8e8, 0.3))
