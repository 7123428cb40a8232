"""Anthropic's own client: messages, streams, counts, tools, errors."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running, running, tooled_llm

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "anthropic_chat.py"
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def ask(run: Run) -> Callable[..., Any]:
    """The program's output for an action."""
    return lambda server, *arguments: json.loads(run("python", PROGRAM, server.url, *arguments).stdout)


def test_answers(ask: Callable[..., Any], server: Running, llm: eyas.LLM) -> None:
    """Text, usage and the reason of the end are those of `LLM.generate`, whole and streamed; the client adds
    the events up by itself, and reads the error."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[0]}]
    own, prompt = llm.generate(messages, max_new_tokens=24), len(llm.ids(messages))
    made = ask(server, "answers", PROMPTS[0])
    for one in (made["whole"], made["streamed"]):
        assert [block["text"] for block in one["content"]] == [own.text]
        assert one["stop_reason"] == {"stop": "end_turn", "length": "max_tokens"}[own.finish_reason]
        usage = one["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt == made["counted"]
        assert usage["output_tokens"] == len(own.token_ids)
    assert made["text"] == own.text
    assert made["events"][:2] == ["message_start", "content_block_start"]
    assert made["events"][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "no model 'another'" in made["refused"]


def test_tools(ask: Callable[..., Any]) -> None:
    """The call that the server was made to write is one for the client, streamed too, and its result goes back."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    with running(tooled_llm(), rows=2) as server:
        made = ask(server, "tools", PROMPTS[2])
    for one in (made["first"], made["streamed"]):
        (call,) = one["content"]
        assert (one["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "get_weather")
        assert call["input"]["day"] in ("today", "tomorrow")
    assert made["first"]["content"][0]["input"] == made["streamed"]["content"][0]["input"]
    assert [block["type"] for block in made["after"]["content"]] == ["text"]


def test_an_agent(ask: Callable[..., Any], server: Running) -> None:
    """What Claude Code sends is answered: 32,000 tokens, texts of the system between turns, a first line that differs,
    after which the prefix is found again. Errors are classes of the client's own, with Anthropic's types."""
    made = ask(server, "agent", PROMPTS[0])
    first, second = made["usages"]
    assert second["cache_read_input_tokens"] > 0.9 * (first["input_tokens"] + first["cache_read_input_tokens"])
    kinds = {name: error[:2] for name, error in made["errors"].items()}
    assert kinds == {
        "too long": ["BadRequestError", "invalid_request_error"],
        "no such path": ["NotFoundError", "not_found_error"],
        "a wrong body": ["BadRequestError", "invalid_request_error"],
    }
    assert "prompt is too long: " in made["errors"]["too long"][2]
