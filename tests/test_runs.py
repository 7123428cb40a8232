"""The commands behind the figures: each has its help, runs in its smallest form, and goes on where it was stopped."""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eyas.errors import EyasError
from fp8_support import MULTIPLIES

pytestmark = pytest.mark.slow  # processes of their own

RUNS = Path(__file__).parents[1] / "runs"
FOLDERS = [RUNS, *sorted(RUNS.parent.glob("packages/*/runs"))]
SCRIPTS = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("[!_]*.py"))}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of runs/ by its name."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            pytest.skip("Ray is installed by `make scale`")

    return load


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that every script can be imported, and shows the command line that its help begins with."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command(name).main()
    assert ended.value.code == 0
    assert f"python {SCRIPTS[name].relative_to(RUNS.parent)}" in capsys.readouterr().out


def test_the_results_are_made_from_the_records(command: Any) -> None:
    """Bug: a table of docs/lab/results.md or README is edited by hand, or a record changes without it; a record does not say
    where it is from."""
    assert command("results").main(["--check"]) == 0, "run: python runs/results.py"
    for path in command("_records").RECORDS.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        json.loads(text)
        named = ('"commit"' in text or '"first_in_commit"' in text) and '"machine"' in text and '"command"' in text
        assert named, f"{path.name} names no commit, machine or command"


def test_the_index_of_the_log(command: Any) -> None:
    """Bug: an entry of the log changes without the log's index."""
    assert command("log_index").main(["--check"]) == 0, "run: python runs/log_index.py"


def test_numbers_of_the_pages(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: README or the guide keeps a number that its record does not have any more."""
    assert command("page_numbers").main([]) == 0, capsys.readouterr().out


# --- runs/gpu.py -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.long
def test_everything_for_a_gpu_runs_in_small(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first minutes on a GPU: every stage runs, texts are equal, a second run measures nothing again."""
    gpu, output = command("gpu"), tmp_path / "gpu.json"
    options = "--device cpu --shape small --minutes 30"
    given = [*options.split(), "--output", str(output)]
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    assert f"left: nothing; failed: {'none' if MULTIPLIES else 'fp8 64 tokens, sampled fp8'}" in capsys.readouterr().out
    content = json.loads(output.read_text())
    measured = [(stage, case) for stage, found in content["stages"].items() for case in found]
    assert measured == [(case.stage, case.name) for case in gpu.cases(gpu.SMALL)]
    texts = [
        row
        for name in ("texts", "compile")
        for record in content["stages"][name].values()
        for row in record["rows"]
        if "texts" in row
    ]
    assert {row["kernels"] for row in texts} == {"off", "on", "compile"}
    assert [row for row in texts if row["dtype"] == "float32" and row["differ"]] == []
    cycles = [row for record in content["stages"]["first"].values() for row in record["rows"]]
    assert {row["method"] for row in cycles} == {"vanilla", "eagle3 8/3/4"}
    assert all(row["tau"] > 1 for row in cycles if row["method"] != "vanilla")
    with nullcontext() if MULTIPLIES else pytest.raises(EyasError):
        gpu.main(given)
    again = json.loads(output.read_text())
    assert again["stages"] == content["stages"]
    assert "== " not in capsys.readouterr().out, "a case was measured again"
