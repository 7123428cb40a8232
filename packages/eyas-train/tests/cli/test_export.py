"""`eyas export`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas import checkpoints

Run = Callable[..., Any]


@pytest.mark.slow
def test_an_export_drafts_in_eyas_too(run: Run, answer: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Bugs: the folder is another one than it says; its head is not read; the line for the engine
    lacks the folder or the target."""
    given = shlex.split("export head --format sglang --target llama --generate-hook --json --output")
    result = run(*given, tmp_path / "out")
    assert result.exit_code == 0, (result.output, result.exception)
    told = json.loads(result.stdout.strip().splitlines()[-1])
    assert (told["method"], told["format"], told["output"]) == ("eagle1", "sglang", str(tmp_path / "out"))
    assert "llama --speculative-algorithm EAGLE " in told["usage"][0]
    assert str(tmp_path / "out") in told["usage"][0]
    hook = sorted(file.name for file in (tmp_path / "out" / "custom_generate").iterdir())
    assert hook == ["generate.py", "requirements.txt"]
    asked = ("--tree.nodes", 9, "--prompt-ids", "5,9,100")
    one, other = (answer("--draft", head, *asked) for head in ("head", tmp_path / "out"))
    assert (one["token_ids"], one["accepted_lengths"]) == (other["token_ids"], other["accepted_lengths"])


def test_what_a_format_lacks_comes_from_the_target(
    run: Run, refused: Callable[..., str], world: Path, tmp_path: Path
) -> None:
    """Bugs: a refusal with a traceback or another status; a head for vLLM whose bias is lost."""
    head = checkpoints.load(world / "head")
    head.tensors["fc.bias"].fill_(0.01)
    checkpoints.save(head, tmp_path / "biased")
    to_vllm = ("export", tmp_path / "biased", "--format", "vllm", "--output", tmp_path / "out")
    assert "pass the target with --target" in refused(*to_vllm)
    assert "has no config.json" in refused(*to_vllm, "--target", str(tmp_path))
    assert "no format 'vlm' to export to; did you mean vllm?" in refused(*to_vllm[:3], "vlm", *to_vllm[4:])
    result = run(*to_vllm, "--target", "llama")
    assert result.exit_code == 0, (result.output, result.exception)
    assert '--speculative-config \'{"method": "eagle"' in result.stdout
    assert "exists already: use another folder" in refused(*to_vllm, "--target", "llama")
