"""Values of a wrong kind, deep within bodies, where no model of pydantic looks: each is answered or refused, and none is a
fault of the server's."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from serving import Running

pytestmark = pytest.mark.slow

JUNK: tuple[Any, ...] = (None, 10**30, "x", [5], [[]], {"type": []}, float("nan"))
TEXT = [{"type": "text", "text": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
CALLED = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": None, "tool_calls": CALLED},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "prediction": {"type": "content", "content": TEXT},
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"a": 1}, "stream_options": {"include_usage": True}, "stop": ["x"], "logprobs": True,
        "top_logprobs": 1, "parallel_tool_calls": True, "add_generation_prompt": True, "continue_final_message": False,
        "max_completion_tokens": 1, "max_tokens": 1,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": TEXT, "content": TEXT},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": TEXT},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "reasoning": {"effort": "none"},
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "tool_use", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": TEXT}]},
        ],
        "system": TEXT,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "x", "keep": "all"}]},
        "stop_sequences": ["x"],
        "model": "tiny",
        "max_tokens": 1,
    },
    "/tokenize": {"messages": [{"role": "user", "content": TEXT}], "tools": TOOLS, "tool_choice": NAMED},
}  # fmt: skip


def variants(value: Any) -> Iterator[Any]:
    """Yield the value with one of its parts, however deep, left out or replaced."""
    if isinstance(value, dict | list):
        for key, part in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            less = value.copy()
            del less[key]
            yield less
            for other in [*JUNK, *variants(part)]:
                changed = value.copy()
                changed[key] = other
                yield changed


@pytest.mark.cover(path=1)
@pytest.mark.parametrize("path", BODIES)
def test_junk_is_answered_or_refused(tooled: Running, path: str) -> None:
    """Guards against status 500 for a value that the body's model does not look at."""
    with httpx2.Client(base_url=tooled.url, timeout=120) as client:
        for body in variants(BODIES[path]):
            content = json.dumps(body)
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (content, response.text)
