"""runs/peers.py: what becomes of the answers of several engines. The engines themselves run in tests/interop."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runs"))
import peers
from _common import Rows

ARGS = argparse.Namespace(prompt_tokens=500)


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Three rounds of four prompts. The other engine is half as fast, errs once, and hangs in one round."""
    made = Rows(tmp_path / "raw.jsonl", {})
    for number in range(3):
        for prompt in range(4):
            for name, seconds in ((peers.PLAIN, 1.0), (peers.BEST, 0.5), ("other", 1.0)):
                ids = [prompt] * (9 + prompt) + [7 if (name, number, prompt) == ("other", 0, 3) else 1]
                late = 60.0 if (name, number) == ("other", 1) else 0.0
                answer = {"ids": ids, "first": 0.1, "seconds": 0.1 + seconds * (9 + prompt) / 100 + late}
                made.add(("answer", number, name, f"p{prompt}"), answer)
        for name, seconds in ((peers.PLAIN, 0.25), ("other", 0.5)):
            made.add(("prompt", number, name), {"seconds": seconds})
            made.add(("counts", number, name), {"drafts": 100, "accepted": 150, "versions": {name: "1.0"}})
    return made


def test_figures_of_an_engine(rows: Rows) -> None:
    """Bug: a prompt's pass counts as decoding, a disturbed round as slowness; a wrong ratio; ids that differ once."""
    found = peers.summary(rows, [peers.PLAIN, peers.BEST, "other", "absent"], ARGS)
    assert set(found) == {peers.PLAIN, peers.BEST, "other"}
    assert found[peers.BEST]["tokens_per_second"][0] == pytest.approx(200)
    assert found["other"]["tokens_per_second"] == pytest.approx([100, 100, 100])
    assert found["other"]["eyas_over_it"] == pytest.approx([2, 2, 2])
    assert found[peers.BEST]["eyas_over_it"] is None
    assert found["other"]["ids_equal"] == [11, 12]
    assert found["other"]["prompt_tokens_per_second"] == 1000
    assert found["other"]["mean_acceptance_length"] == 2.5
    table = peers.table(found, {peers.PLAIN: True, peers.BEST: True, "other": False})
    lines = table.splitlines()[2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [peers.BEST, peers.PLAIN, "other"]
    assert "11 of 12, rounded | 2.00 [2.00, 2.00] |" in lines[2]
