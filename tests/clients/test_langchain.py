"""LangChain's ChatOpenAI: an answer, a stream, a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "langchain_chat.py"
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def ask(run: Run, server: Running) -> Callable[..., Any]:
    """What the program prints for an action."""
    return lambda action, *arguments: json.loads(run("python", PROGRAM, server.v1, action, *arguments).stdout)


def test_answers(ask: Callable[..., Any], llm: eyas.LLM) -> None:
    """Texts, usage and the reason of the end are those of `LLM.generate`, whole, streamed, and several at once."""
    own = [llm.generate(prompt, max_new_tokens=24) for prompt in PROMPTS]
    made = ask("answers", *PROMPTS)
    assert made["invoked"]["text"] == made["streamed"]["text"] == own[0].text
    assert made["invoked"]["finish"] == made["streamed"]["finish"] == own[0].finish_reason
    tokens = {"input_tokens": len(llm.ids(PROMPTS[0])), "output_tokens": len(own[0].token_ids)}
    for one in (made["invoked"], made["streamed"]):
        assert {name: one["usage"][name] for name in tokens} == tokens
    assert made["chunks"] > 3
    assert made["batch"] == made["asynchronous"] == [result.text for result in own]
