"""SafeAILab's own EAGLE-1 code (their package eagle-llm) runs our EAGLE-1 head: equal texts, and
drafts that are accepted."""

import sys
from pathlib import Path

import pytest

from interop_engines import ours, python_of

sys.path.append(str(Path(__file__).parents[2] / "runs"))
from _peers import DRAFTS, Workshop, mean_length, reference_head, reference_target

pytestmark = pytest.mark.slow
LIMIT = 48
PROMPTS = 6


def test_reference(prompts: list[list[int]], heads: dict[str, Path], tmp_path: Path) -> None:
    """Guards against an export that their code computes otherwise than eyas, and an adapter that
    measures something else."""
    python = python_of(".venv-reference")
    expected, _ = ours(prompts[:PROMPTS], heads["eagle3"], "eagle3", DRAFTS, LIMIT)
    workshop = Workshop(tmp_path, 1, None, None)
    places = {"target": reference_target(tmp_path), "head": reference_head(tmp_path)}
    for plain in (True, False):
        with workshop.program(python, "with_reference.py", "reference", plain=plain, **places) as ask:
            found = [ask("answer", ids=ids, max_tokens=LIMIT)["ids"] for ids in prompts[:PROMPTS]]
            length = mean_length(ask("counts"))
        print(f"SafeAILab's code, plain {plain}: mean length {length}")
        assert found == expected
        assert (length is None) == plain
        assert length is None or length > 2
