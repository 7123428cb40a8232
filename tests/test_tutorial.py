"""docs/start/tutorial.ipynb runs from its first cell to its last, without Jupyter."""

import json
from pathlib import Path
from typing import Any

import pytest

from golden import needs_weights

NOTEBOOK = Path(__file__).parents[1] / "docs" / "start" / "tutorial.ipynb"


@pytest.mark.exhaustive
@needs_weights
def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first page that a newcomer tries: every cell runs, and prints where the page shows that it prints."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    assert len(cells) >= 6
    for i, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"tutorial.ipynb, code cell {i + 1}", "exec"), names)
        assert bool(capsys.readouterr().out.strip()) == bool(cell["outputs"]), f"code cell {i + 1}"
    assert names["result"].stats.tau > 1
    assert len(names["longest"].path) > 1
