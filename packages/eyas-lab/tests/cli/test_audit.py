"""`eyas audit`: bad input, eyas in this process and by its server, exit statuses, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eyas
from eyas_lab.commands import audit
from serving import running

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://x/v1", "--draft", "head"), "--url and --draft are different deployments"),
        (("--sampling", "0"), "with a temperature above 0"),
        (("--sampling", "1:x"), "write T, T:K or T:K:P"),
        (("--sampling", "1:2:0.5:7"), "write T, T:K or T:K:P"),
        (("--sampling", "1:0:2"), "top_p must be"),
        (("--error", "0.7"), "--error must be below 0.5"),
        (("--weights", "int8"), "the referee is the target as it is"),
        (("--extra-body", "[]"), "takes a JSON object"),
        (("--url", "x"), "--url x: write it as"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_bad_options_are_refused(
    refused: Callable[..., str], arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Guards against mistakes that are noticed after minutes."""
    monkeypatch.chdir(tmp_path)
    assert message in refused("audit", "--target", "llama", "--kernels", "off", *arguments)


def quick(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is 1"}\n{"prompt": "why"}\n')
    greedy = ("--tokens", 0, "--max-new-tokens", 6, "--prompts", tmp_path / "prompts.jsonl")
    return ("audit", "--target", "llama", "--kernels", "off", *greedy, "--output", tmp_path / "out", "--json")


@pytest.mark.slow
def test_eyas_in_this_process(run: Run, tmp_path: Path) -> None:
    """Guards the whole command: a pass, its status, its files."""
    result = run(*quick(tmp_path), "--draft", "head", "--method", "eagle2")
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["verdict"], report["deployment"]) == ("passed", "eyas, eagle2")
    assert "eyas, eagle2: passed" in result.stdout
    assert "passed" in (tmp_path / "out" / "report.md").read_text()
    again = run(*quick(tmp_path), "--draft", "head", "--method", "eagle2", "--seed", 3)
    assert again.exit_code == 2
    assert "holds an audit with other settings (plan, seed)" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_a_server_of_eyas(run: Run, world: Path, tmp_path: Path, same: bool) -> None:
    """Guards audits by URL, with ids from the server: its model passes, another model fails with status 1."""
    llm = eyas.load(str(world / "llama"), str(world / "head"), kernels="off", tree="fixed")
    if not same:
        llm.target.model.lm_head.weight.data.mul_(-1)
    with running(llm, name="llama") as server:
        result = run(*quick(tmp_path), "--url", server.v1, "--server-dtype", "float32", "--concurrency", 2)
    assert result.exit_code == (0 if same else 1), (result.output, result.exception)
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert report["verdict"] == ("passed" if same else "failed")
    assert report["greedy"]["logprobs"]["tokens"] == 12
    assert "encoded again" not in result.stderr


@pytest.mark.exhaustive
def test_too_few_tokens_are_not_enough(run: Run, tmp_path: Path) -> None:
    """Guards status 3: nothing is wrong, and a bias could have been missed. The power is shown before."""
    result = run(*quick(tmp_path), "--draft", "head", "--tokens", 60, "--sampling", "1")
    assert result.exit_code == 3, (result.output, result.exception)
    assert "a temperature 5 % too high | 0." in result.stderr
    assert "not enough data" in result.stdout


@pytest.mark.slow
def test_an_assistant(run: Run, tmp_path: Path) -> None:
    """Guards assisted generation of transformers, here with the target as its own assistant."""
    result = run(*quick(tmp_path), "--assistant", "llama")
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.slow
def test_the_self_test(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the status of the self-test: a bias that is not found is an error (here, all of them)."""
    from eyas_lab.audit import arms

    monkeypatch.setattr(arms, "ARMS", {"plain": "no bias", "relaxed": "a relaxed one"})
    result = run(*quick(tmp_path), "--self-test", "--skip", "1", "--depth", 2)
    assert result.exit_code == 1, (result.output, result.exception)
    rows = json.loads(result.stdout.strip().splitlines()[-1])
    assert [row["found"] for row in rows] == ["passed", "passed"]
    assert audit.STATUS == {"passed": 0, "failed": 1, "not enough data": 3}
