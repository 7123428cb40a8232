"""docs/guide/transformers.md is true: its code runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

import eyas
from golden import needs_weights

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "transformers.md").read_text()


@pytest.mark.exhaustive
@needs_weights
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer copies it from top to bottom."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/guide/transformers.md", "exec"), names)
    told = capsys.readouterr().out
    streamed, _, answer = told.partition("tokens per forward")
    assert float(streamed.split()[-1]) >= 1, "how much is drafted depends on the machine"
    assert len(answer.strip()) > 5
    assert "generate" not in names["model"].__dict__


def test_what_is_refused_is_what_the_page_says() -> None:
    """The page's list of names is that of the code."""
    from eyas.hooks import refusals

    for name in refusals.SETTINGS:
        assert name.replace("_", " ") in PAGE.replace("_", " "), name
    assert eyas.hf.__name__ == "hf"
