"""`eyas examine` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command_line import last_json
from eyas import tiny
from eyas_lab.commands.demo import EMBEDDED_PROMPTS
from serving import running, small_llm

Run = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("Hello! Who are you?\n\n" + "\n".join(EMBEDDED_PROMPTS))
    return path


@pytest.mark.slow
def test_a_head_that_fits(run: Run, prompts: Path) -> None:
    """Bug: the table, the verdict or the status of a good head."""
    asked = ("examine", tiny.HEADS["mtp"], "--prompts", prompts, "--max-new-tokens", 24)
    shown = run(*asked)
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, "verdict: fits"), shown.output
    assert "as published" in shown.stdout
    assert "its training" in shown.stdout
    found = last_json(run(*asked, "--json"))
    assert (found["verdict"], found["method"], found["steps"]) == ("fits", "mtp", [])
    assert found["published"]["alphas"]["0-alpha"] > 0.5


@pytest.mark.slow
def test_a_head_that_does_not(run: Run, prompts: Path, tmp_path: Path) -> None:
    """Bug: a fault is found and not told, or told with status 0."""
    config = json.loads((tiny.HEADS["eagle3"] / "config.json").read_text())
    config["eyas"] |= {"norm_before_residual": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny.HEADS["eagle3"] / "model.safetensors")
    shown = run("examine", tmp_path, "--prompts", prompts, "--max-new-tokens", 24)
    assert shown.exit_code == 1, shown.output
    advice = '"eyas": {"norm_before_residual": true}; write "eyas": {"norm_before_residual": false}'
    assert advice in shown.stdout
    assert shown.stdout.splitlines()[-1] == "verdict: fits with changes"


@pytest.mark.slow
def test_a_live_server(run: Run, prompts: Path) -> None:
    """Bug: the table shows other shares than the server's answers had, or none."""
    chain = {"nodes": 4, "depth": 3, "branch": 1}
    llm, counted = small_llm(draft=tiny.HEADS["mtp"], tree=chain), [0] * 4
    for prompt in EMBEDDED_PROMPTS:
        for length in llm.generate(prompt, max_new_tokens=24).stats.accepted_lengths:
            counted = [count + (length >= depth) for depth, count in enumerate(counted)]
    with running(llm) as server:
        for prompt in EMBEDDED_PROMPTS:
            asked = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24}
            assert server.post("/v1/chat/completions", {"model": "tiny", **asked}).status_code == 200
        server.wait_until_idle()
        asked_for = ("examine", tiny.HEADS["mtp"], "--prompts", prompts, "--max-new-tokens", 24)
        shown = run(*asked_for, "--metrics", f"{server.url}/metrics")
        found = last_json(run(*asked_for, "--metrics", f"{server.url}/metrics", "--json"))
    assert "on the server" in shown.stdout
    assert found["served"] == {f"{n}-alpha": counted[n + 1] / counted[n] for n in range(3)}
    assert found["served"]["0-alpha"] == pytest.approx(found["published"]["alphas"]["0-alpha"], abs=0.15)


def test_bad_input(refused: Callable[..., str], prompts: Path, tmp_path: Path) -> None:
    """Bug: a traceback, or minutes of work before the refusal."""
    assert "there is no such folder" in refused("examine", "no head")
    assert "has no config.json" in refused("examine", tmp_path, "--target", "llama")
    assert "does not exist" in refused("examine", "head", "--prompts", "none.txt")
    prompts.write_text("one\n")
    assert "has 1 of the 2 prompts needed" in refused("examine", "head", "--target", "llama", "--prompts", prompts)
    assert "--metrics" in refused("examine", "head", "--metrics", "http://127.0.0.1:9/metrics")
    assert "no tokenizer" in refused("examine", "head", "--target", "bare")


@pytest.mark.slow
def test_a_kind_that_is_not_examined(refused: Callable[..., str], tmp_path: Path) -> None:
    """Bug: a traceback for a head of Medusa."""
    D, V = 48, 160
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    held = {"0.0.linear.weight": torch.zeros(D, D), "0.0.linear.bias": torch.zeros(D), "0.1.weight": torch.zeros(V, D)}
    save_file(held, tmp_path / "medusa_lm_head.safetensors")
    assert "heads of medusa are not examined" in refused("examine", tmp_path, "--target", "llama")
