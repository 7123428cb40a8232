"""LangChain's ChatOpenAI: answers, streams, batches, objects of a class, tools."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running, running, tooled_llm

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "langchain_chat.py"
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def ask(run: Run) -> Callable[..., Any]:
    """The program's output for an action."""
    return lambda server, *arguments: json.loads(run("python", PROGRAM, server.v1, *arguments).stdout)


def test_answers(ask: Callable[..., Any], server: Running, llm: eyas.LLM) -> None:
    """Texts, usage and the reason of the end are those of `LLM.generate`, whole, streamed, and
    several at once."""
    own = [llm.generate(prompt, max_new_tokens=24) for prompt in PROMPTS]
    made = ask(server, "answers", *PROMPTS)
    assert made["invoked"]["text"] == made["streamed"]["text"] == own[0].text
    assert made["invoked"]["finish"] == made["streamed"]["finish"] == own[0].finish_reason
    tokens = {"input_tokens": len(llm.ids(PROMPTS[0])), "output_tokens": len(own[0].token_ids)}
    for one in (made["invoked"], made["streamed"]):
        assert {name: one["usage"][name] for name in tokens} == tokens
    assert made["chunks"] > 3
    assert made["batch"] == made["asynchronous"] == [result.text for result in own]


def test_objects_and_tools(ask: Callable[..., Any], llm: eyas.LLM) -> None:
    """LangChain reads the object and the call that the server was made to write, and sends the
    call's result back."""
    pytest.importorskip("llguidance", reason="structured output needs llguidance")
    with running(tooled_llm(), rows=2) as server:
        objects = ask(server, "structured", PROMPTS[0])
        assert objects.keys() == {"json_schema", "function_calling"}
        for made in objects.values():
            assert made["kind"] in ("table", "movie")
            assert made["seats"] in (1, 2, 3)
        made = ask(server, "tools", PROMPTS[2])
        assert (made["call"]["name"], made["call"]["args"].keys()) == ("get_weather", {"day"})
        (streamed,) = made["streamed"]
        assert (streamed["name"], streamed["args"]) == (made["call"]["name"], made["call"]["args"])
        assert made["answer"]
