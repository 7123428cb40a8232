"""Further clients: OpenAI's Agents SDK, litellm, the program llm, and the AI SDK of node."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
import processes
from serving import PROMPTS, Running, running, tooled_llm

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., CompletedProcess[str]]
NEXT = "And then?"


@pytest.fixture
def ask(run: Run) -> Callable[..., Any]:
    """The program's output for an action."""
    return lambda server, *arguments: json.loads(
        run("python", PROGRAMS / "others.py", server.url, *arguments).stdout.splitlines()[-1]
    )


def turns(llm: eyas.LLM) -> tuple[str, str]:
    """The texts of two turns, by `LLM.generate`."""
    messages = [{"role": "user", "content": PROMPTS[1]}]
    first = llm.generate(messages, max_new_tokens=24).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": NEXT}]
    return first, llm.generate(messages, max_new_tokens=24).text


def test_agents(ask: Callable[..., Any]) -> None:
    """Guards the loop of an agent through /v1/responses: the function runs with an argument of its schema, and
    a second turn goes on by the id of a response."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    llm = tooled_llm()
    with running(llm, rows=2) as server:
        made = ask(server, "agents", PROMPTS[1])
    (day,) = made["asked"]
    assert made["first"] == f"sunny {day}"
    assert (made["second"], made["third"]) == turns(llm)


def test_litellm(ask: Callable[..., Any], server: Running, llm: eyas.LLM) -> None:
    """Guards both dialects as litellm speaks them."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    expected = {"whole": own.text, "streamed": own.text, "tokens": len(own.token_ids)}
    assert ask(server, "litellm", PROMPTS[0]) == {"openai": expected, "anthropic": expected}


def test_llm(run: Run, server: Running, llm: eyas.LLM, tmp_path: Path) -> None:
    """Guards the lines of docs/guide/clients.md for the program `llm`."""
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: eyas\n  model_name: tiny\n  api_base: {server.v1}\n  api_key_name: eyas\n"
    )
    own = llm.generate(PROMPTS[0], max_new_tokens=24).text
    for more in ([], ["--no-stream"]):
        options = ["-o", "temperature", 0, "-o", "max_tokens", 24, "--key", "none", *more]
        assert run("llm", "-m", "eyas", PROMPTS[0], *options).stdout.rstrip("\n") == own.rstrip("\n")


def test_ai_sdk(programs: Path, server: Running, llm: eyas.LLM) -> None:
    """Guards the second turn, for which the default provider names items of the first answer; the other
    providers, and streams."""
    folder, node = programs.parent / "node", shutil.which("node")
    if node is None or not (folder / "node_modules").is_dir():
        pytest.skip("the AI SDK is not installed here: make clients installs it where npm is")
    shutil.copy(PROGRAMS / "second_turn.mjs", folder)
    done = processes.run([node, folder / "second_turn.mjs", server.url, PROMPTS[1]], env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = turns(llm)
    made = json.loads(done.stdout)
    assert made.keys() == {"responses", "stateless", "chat", "compatible", "anthropic"}
    for name, one in made.items():
        assert (one["first"], one["streamed"], one["second"]) == (first, first, second), name
        assert one["tokens"] > 3
