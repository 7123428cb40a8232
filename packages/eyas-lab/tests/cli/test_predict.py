"""`eyas predict`: bad input, the fields of --json, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes

Run = Callable[..., Any]
# What scripts read; a field that is renamed breaks them.
FIELDS = {
    "target": {"name", "model_type", "dtype", "hidden", "inner", "vocab", "layers", "heads", "kv_heads", "width",
               "dense", "experts", "chosen", "expert", "stored", "windowed", "window", "weights"},
    "machine": {"name", "bandwidth", "flops", "overlap", "pass_seconds", "layer_seconds", "cycle_seconds", "draft_cycle_seconds",
                "draft_seconds", "level_seconds", "cache_bytes", "draft_bytes", "number_bytes", "source"},
    "draft": {"name", "method", "once", "level", "shared", "layers", "stored", "acceptance"},
    "settings": {"weights", "rows", "context", "limit"},
    "plain": {"seconds", "tokens_per_second"},
}  # fmt: skip
ROWS = {
    "passes": {"tokens", "bytes", "flops", "seconds", "bound"},
    "depths": {"depth", "acceptance", "tau"},
    "trees": {"tree", "tau", "draft_seconds", "pass_seconds", "c", "speedup", "low", "high"},
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--machine", "h300"), "neither a JSON file nor a known machine; did you mean h"),
        (("--machine", "h100", "--method", "medusa"), "there is no arithmetic for 'medusa'; known: eagle1"),
        (("--machine", "h100", "--method", "small_model"), "needs --draft"),
        (("--machine", "h100", "--acceptance", "0.5,x"), "write numbers from 0 to 1 by depth"),
        (("--machine", "h100", "--acceptance", "1.5"), "write numbers from 0 to 1 by depth"),
        (("--machine", "h100", "--tree", "60/8"), "write nodes, depth and branch"),
        (("--machine", "h100", "--force"), "--force and --activations are for --machine cpu"),
        (("--machine", "h100", "--draft", "nowhere"), "draft head nowhere: no such folder"),
        (("--machine", "h100", "--target", "broken.json"), "broken.json is not the config.json of a model"),
        (("--machine", "h100", "--target", "odd.json"), "odd.json is not the config.json of a model"),
        (("--machine", "h100", "--target", "impossible.json"), "no such model can be made"),
        (("--machine", "h100", "--target", "nowhere/"), "nowhere"),
        (("--machine", "h100", "--rows", "0"), "rows"),
    ],
)
def test_bad_input(
    refused: Callable[..., str], arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Bug: a traceback, or a prediction of something else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("broken.json").write_text("{")
    Path("odd.json").write_text('{"model_type": "nothing"}')
    Path("impossible.json").write_text('{"model_type": "llama", "hidden_size": 64, "intermediate_size": -1}')
    given = () if "--target" in arguments else ("--target", "llama")
    assert message in refused("predict", *given, *arguments)


def test_json_has_its_fields(run: Run) -> None:
    """Bug: a field is renamed; a pipe gets something else than one JSON object."""
    result = run("predict", "--target", "llama", "--machine", "h200", "--draft", "head", "--trees", 2, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found.keys() == {*FIELDS, *ROWS, "verdict"}
    assert {name: set(found[name]) for name in FIELDS} == FIELDS
    assert {name: set(found[name][0]) for name in ROWS} == ROWS
    assert len(found["trees"]) == 2
    assert found["draft"]["method"] == "eagle1"


def test_the_machine_of_one_prediction_is_a_file_for_the_next(run: Run, tmp_path: Path) -> None:
    """Bug: a machine that was measured elsewhere cannot be used here."""
    given = ("predict", "--target", "llama", "--json")
    first = json.loads(run(*given, "--machine", "h100").stdout)
    (tmp_path / "machine.json").write_text(json.dumps(first["machine"]))
    second = json.loads(run(*given, "--machine", tmp_path / "machine.json").stdout)
    assert first == second


def test_tables(run: Run) -> None:
    """Bug: a table that cannot be printed, or no verdict at the end."""
    result = run("predict", "--target", "llama", "--machine", "h100", "--method", "suffix", "--acceptance", "0.1")
    assert result.exit_code == 0, (result.output, result.exception)
    for part in ("GB read", "GFLOP", "bound by", "tau of a chain", "Acceptance, given", "speed-up", "tokens/s"):
        assert part in result.stdout, part
    assert result.stdout.splitlines()[-1].startswith("drafting ")
    assert "data sheet" in result.stderr


@pytest.mark.slow
def test_help_does_not_import_torch() -> None:
    """The help must not take as long as loading a model."""
    code = "import sys; from eyas.cli import run; run(['predict', '--help']); print('torch' in sys.modules, file=sys.stderr)"
    assert processes.run([sys.executable, "-c", code]).stderr.strip() == "False"
