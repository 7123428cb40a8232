"""/v1/messages and /v1/messages/count_tokens, as bytes; tests/clients has Anthropic's own client."""

import re
from typing import Any

import httpx2
import pytest

import eyas
from eyas.serve.errors import ApiError
from eyas.serve.messages import CountBody
from serving import DAY, PROMPTS, WRITTEN, Running, events, running

TALK = [{"role": "user", "content": PROMPTS[0]}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": TALK}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": DAY}


def post(server: Running, path: str = "/v1/messages", **body: Any) -> httpx2.Response:
    return server.post(path, body, headers={"anthropic-version": "2023-06-01"})


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The data of each event; its name is its type."""
    response = post(server, stream=True, **body)
    made = events(response)
    assert re.findall(r"(?m)^event: (.*)$", response.text) == [one["type"] for one in made]
    return made


def test_a_message(server: Running, llm: eyas.LLM) -> None:
    """Text, the reason of the end and usage are those of `LLM.generate`; the fields are Anthropic's."""
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    made = post(server, **ASK).json()
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "tiny")
    assert made["content"] == [{"type": "text", "text": own.text}]
    assert (made["stop_reason"], made["stop_sequence"]) == ("end_turn", None)
    usage = made["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(llm.ids(PROMPTS[0]))
    assert usage["output_tokens"] == len(own.token_ids)


@pytest.mark.slow
def test_events(server: Running, llm: eyas.LLM) -> None:
    """The events come in Anthropic's order, and add up to the whole message."""
    own = llm.generate(PROMPTS[0], max_new_tokens=5)
    made = streamed(server, **{**ASK, "max_tokens": 5})
    kinds = [one["type"] for one in made]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(one["delta"]["text"] for one in made[2:-3]) == own.text
    assert made[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert made[-2]["usage"]["output_tokens"] == 5


@pytest.mark.slow
def test_thinking_a_text_and_calls(tooled: Running) -> None:
    """The blocks keep their order, whole and as events."""
    asked = {**ASK, "max_tokens": 400, "tools": [WEATHER], "choice": [WRITTEN]}
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    made = post(tooled, **asked).json()
    assert [block["type"] for block in made["content"]] == kinds
    assert (made["stop_reason"], made["content"][2]["input"]) == ("tool_use", {"day": "today"})
    assert (made["content"][0]["thinking"], made["content"][1]["text"]) == ("Hm.", "Let me see.")
    begun = [one["content_block"] for one in streamed(tooled, **asked) if one["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == kinds
    assert begun[2]["input"] == {}
    single = post(tooled, **asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True}).json()
    assert [block["type"] for block in single["content"]] == kinds[:3]


@pytest.mark.slow
def test_count_tokens(tooled: Running) -> None:
    """The count is what a message then reads: system text, tools and earlier calls included."""
    use = {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"day": "today"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]},
    ]
    counts = []
    for more in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}, {"tools": [WEATHER], "messages": messages}):
        body = {**ASK, **more}
        usage = post(tooled, **body).json()["usage"]
        del body["max_tokens"]
        counts.append(post(tooled, "/v1/messages/count_tokens", **body).json()["input_tokens"])
        assert counts[-1] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert len(set(counts)) == 4


def test_messages_of_a_chat() -> None:
    """Guards the translation: results before the text beside them, images as data, thinking, calls as
    objects; cache_control changes nothing and is not told as ignored."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    body = CountBody.model_validate({
        "model": "tiny",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "b"}, use]},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "tool_result", "tool_use_id": "1"}]},
        ],
        "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "x"}, "unheard_of": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"},
    })  # fmt: skip
    body.check()
    chat = body.chat()
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant", "tool", "user"]
    assert chat.messages[1]["content"][1]["image_url"]["url"] == "data:image/png;base64,QUJD"
    turn = chat.messages[2]
    assert (turn["reasoning_content"], turn["content"]) == ("t", [{"type": "text", "text": "b"}])
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert chat.chat_template_kwargs == {"enable_thinking": True}
    assert body.ignored == ["thinking.budget_tokens", "unheard_of"]


def test_errors_of_every_status(llm: eyas.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Anthropic's clients, which look for `type` and `error.type`: errors that come before the route, or from a
    fault of ours, had OpenAI's form. A client of Anthropic's names itself by a header on other paths."""

    faults: list[Exception] = [ApiError(503, "it ends"), ZeroDivisionError()]

    async def fault(*_: Any) -> Any:
        raise faults.pop()

    with running(llm, rows=1, keys=("right",), max_body_bytes=1000) as server:
        good, named = {"x-api-key": "right"}, {"x-api-key": "right", "anthropic-version": "2023-06-01"}

        def error(path: str, method: str = "POST", headers: Any = good, **how: Any) -> tuple[int, str, str]:
            made = server.request(method, path, headers=headers, **how)
            body = made.json()
            assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
            return made.status_code, body["error"]["type"], body["error"]["message"]

        text = {"content": b"{}", "headers": {**good, "content-type": "text/plain"}}
        assert error("/v1/messages", headers={}, json=ASK)[:2] == (401, "authentication_error")
        assert error("/v1/messages/batches", json=ASK)[:2] == (404, "not_found_error")
        assert error("/v1/messages", "GET")[:2] == (405, "invalid_request_error")
        assert error("/v1/messages", **text)[:2] == (415, "invalid_request_error")
        assert error("/v1/messages", json={**ASK, "metadata": {"a": "x" * 1000}})[:2] == (413, "request_too_large")
        assert error("/v1/messages", json={**ASK, "model": "x"})[:2] == (404, "not_found_error")
        assert error("/v1/v1/messages", headers=named, json=ASK)[2].endswith("leave it out of its base URL")
        assert error("/messages", headers=named, json=ASK)[0] == 404
        monkeypatch.setattr(server.service, "submit", fault)
        assert error("/v1/messages", json=ASK)[:2] == (500, "api_error")
        assert error("/v1/messages", json=ASK)[:2] == (503, "overloaded_error")
        other = server.post("/v1/chat/completions", {"messages": 5}, headers=good).json()
        assert other["error"].keys() == {"message", "type", "param", "code"}
